"""Sign-in, the App's first page and the admin, as a browser meets them."""

import re
import uuid
from typing import Any

import httpx
import psycopg
import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import connection, transaction
from django.test import Client, RequestFactory

from accounts.keys import digest_of
from accounts.models import ApiKey, User
from acsinfra.core.bare_pages import server_error
from tests.live_server import LiveServer, make_key, make_user

pytestmark = pytest.mark.django_db(transaction=True)

PASSWORD = "correct horse battery"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@pytest.fixture
def user() -> User:
    return make_user(password=PASSWORD)


def sign_in(client: httpx.Client, name: str, password: str = PASSWORD, page: str = "/app/sign-in") -> httpx.Response:
    form = client.get(page).text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token is not None
    return client.post(page, data={"username": name, "password": password, "csrfmiddlewaretoken": token[1]})


def test_pages_have_a_strict_content_security_policy_and_nothing_inline(server: LiveServer, user: User) -> None:
    make_key(user)
    with server.client(follow_redirects=True) as client:
        pages = [client.get("/app/sign-in"), client.get("/app/none")]
        sign_in(client, user.username)
        pages.append(client.get("/app"))
        style = client.get("/static/acsinfra/app.css")
    assert [page.status_code for page in pages] == [200, 404, 200]
    for page in pages:
        assert page.headers["Content-Security-Policy"] == CSP
        assert page.headers["X-Frame-Options"] == "DENY"
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        assert page.headers["X-Request-Id"].startswith("req_")
        assert "access-control-allow-origin" not in page.headers
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|javascript:", page.text)
    assert style.status_code == 200
    assert style.headers["content-type"].startswith("text/css")


def test_a_user_signs_in_and_out(server: LiveServer, user: User) -> None:
    key, text = make_key(user)
    with server.client() as client:
        assert client.get("/").headers["location"] == "/app"
        away = client.get("/app")
        assert (away.status_code, away.headers["location"]) == (302, "/app/sign-in?next=/app")
        answer = sign_in(client, user.username)
        assert (answer.status_code, answer.headers["location"]) == (302, "/app")
        home = client.get("/app").text
        assert user.username in home
        assert f"{server.url}/v1" in home
        keys = client.get("/app/keys").text
        assert key.prefix in keys
        assert text not in keys
        assert "/admin/" not in home
        assert client.get("/app/sign-in").headers["location"] == "/app"
        token = client.cookies["csrftoken"]
        out = client.post("/app/sign-out", headers={"X-CSRFToken": token})
        assert (out.status_code, out.headers["location"]) == (302, "/app/sign-in")
        assert client.get("/app").status_code == 302


def test_one_user_does_not_see_another_s_keys(server: LiveServer, user: User) -> None:
    key, _ = make_key()
    with server.client() as client:
        sign_in(client, user.username)
        assert key.prefix not in client.get("/app/keys").text


@pytest.mark.parametrize("fields", [{"is_active": False}, {"password": "another long one"}])
def test_sign_in_refuses_without_saying_why(server: LiveServer, fields: dict[str, Any]) -> None:
    refused = make_user(**{"password": PASSWORD, **fields})
    with server.client() as client:
        answers = [sign_in(client, refused.username), sign_in(client, "nobody-here")]
        assert client.get("/app").status_code == 302
    told = [re.search(r'role="alert">(.*?)</p>', answer.text) for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0][1] == told[1][1]


def test_forms_need_their_csrf_token(server: LiveServer, user: User) -> None:
    with server.client() as client:
        answer = client.post("/app/sign-in", data={"username": user.username, "password": PASSWORD})
        assert answer.status_code == 403
        sign_in(client, user.username)
        assert client.post("/app/sign-out").status_code == 403
        assert client.get("/app").status_code == 200


def test_sign_in_leads_only_to_our_own_pages(server: LiveServer, user: User) -> None:
    with server.client() as client:
        answer = sign_in(client, user.username, page="/app/sign-in?next=https://evil.example/")
        assert answer.headers["location"] == "/app"


def test_session_cookies_are_out_of_reach_of_scripts(server: LiveServer, user: User) -> None:
    with server.client() as client:
        cookies = sign_in(client, user.username).headers.get_list("set-cookie")
    [session] = [cookie for cookie in cookies if cookie.startswith("sessionid=")]
    assert "HttpOnly" in session
    assert "SameSite=Lax" in session


def test_a_session_opens_no_api_route_and_the_api_starts_none(server: LiveServer, user: User) -> None:
    _, text = make_key(user)
    with server.client() as client:
        sign_in(client, user.username)
        assert client.post("/v1/chat/completions", json={}).status_code == 401
    with server.client(text) as client:
        answer = client.get("/v1/models")
    assert "set-cookie" not in answer.headers


def test_a_host_that_is_not_ours_gets_no_page(server: LiveServer) -> None:
    with server.client() as client:
        assert client.get("/app/sign-in", headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/docs/guide", 405, "Not this way"),
        ("GET", "/app/keys?name=%00", 400, "Bad request"),
        ("GET", "/app/%00", 400, "Bad request"),
        ("POST", "/app/sign-in", 413, "Too large"),
    ],
)
def test_a_browser_is_always_shown_a_page(server: LiveServer, method: str, path: str, status: int, said: str) -> None:
    with server.client() as client:
        body = b"x" * (settings.MAX_BODY_BYTES + 1) if status == 413 else None
        token = client.get("/app/sign-in").cookies["csrftoken"]
        answer = client.request(method, path, content=body, headers={"X-CSRFToken": token})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert f"<h1>{said}</h1>" in answer.text
    assert answer.headers["Content-Security-Policy"] == CSP


def test_a_fault_of_ours_is_told_from_a_part_that_is_away(client: Client, rf: RequestFactory, user: User) -> None:
    client.raise_request_exception = False
    client.force_login(user)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE accounts_apikey RENAME TO elsewhere")
        broken = client.get("/app/keys")
        transaction.set_rollback(True)
    assert broken.status_code == 500
    assert broken.headers["X-Request-Id"] in broken.content.decode()
    assert client.get("/app/keys").status_code == 200
    try:
        psycopg.connect("host=127.0.0.1 port=1 connect_timeout=2")
    except psycopg.OperationalError:
        away = server_error(rf.get("/app"))
    assert (away.status_code, away["Retry-After"]) == (503, "5")
    assert "does not answer just now" in away.content.decode()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("/admin", "/admin/"),
        ("/app/", "/app"),
        ("/app/jobs/?kind=harvest", "/app/jobs?kind=harvest"),
        ("/docs//", "/docs"),
        ("/docs/guide/steering/", "/docs/guide/steering"),
        ("/favicon.ico", "/static/acsinfra/icon.svg"),
    ],
)
def test_what_people_type_leads_to_the_page(client: Client, typed: str, meant: str) -> None:
    assert client.get(typed).headers["location"] == meant


def test_an_address_that_takes_a_form_leads_back_to_the_page_of_the_form(client: Client, user: User) -> None:
    key, _ = make_key(user)
    job = uuid.uuid4()
    pages = {
        f"/app/keys/{key.pk}/pause": "/app/keys",
        f"/app/keys/{key.pk}/resume": "/app/keys",
        "/app/account/end-session": "/app/account",
        f"/app/jobs/{job}/cancel": f"/app/jobs/{job}",
    }
    for path, page in pages.items():
        assert client.post(path).headers["location"] == f"/app/sign-in?next={page}"
    client.force_login(user)
    assert client.get("/app/sign-out").headers["location"] == "/app"
    for path, page in pages.items():
        if str(job) not in path:
            assert client.get(path).headers["location"] == page
    assert client.get("/app").status_code == 200
    key.refresh_from_db()
    assert key.state == "working"


def test_the_pages_work_under_django_s_own_test_client(client: Client, user: User) -> None:
    client.force_login(user)
    answer = client.get("/app")
    assert answer.status_code == 200
    assert answer.headers["Content-Security-Policy"] == CSP
    assert client.get("/v1/none").json()["error"]["code"] == "not_found"
    assert AnonymousUser().is_authenticated is False


# The admin


@pytest.fixture
def operator() -> User:
    return make_user(password=PASSWORD, is_staff=True, is_superuser=True)


def test_the_admin_is_for_operators(server: LiveServer, user: User, operator: User) -> None:
    with server.client() as client:
        sign_in(client, user.username)
        refused = client.get("/admin/", follow_redirects=True)
        assert refused.status_code == 403
        assert "may not open this page" in refused.text
    with server.client() as client:
        asked = client.get("/admin/", follow_redirects=True)
        assert asked.url.path == "/app/sign-in"
        assert sign_in(client, operator.username, page=str(asked.url)).headers["location"] == "/admin/"
        index = client.get("/admin/")
        assert index.status_code == 200
        assert index.headers["Content-Security-Policy"] == CSP
        assert "/admin/accounts/apikey/" in index.text
        assert "/admin/" in client.get("/app").text


def test_the_admin_s_pages_hold_nothing_inline_that_the_policy_blocks(server: LiveServer, operator: User) -> None:
    key, _ = make_key()
    with server.client() as client:
        sign_in(client, operator.username)
        for path in (
            "user/",
            "user/add/",
            f"user/{operator.pk}/change/",
            "apikey/",
            "apikey/add/",
            f"apikey/{key.pk}/change/",
        ):
            page = client.get(f"/admin/accounts/{path}")
            assert page.status_code == 200
            assert not re.search(r"<script(?![^>]*\b(src|type=\"application/json\"|id=)[^>]*)>\s*\S", page.text)


def test_a_key_made_in_the_admin_is_shown_once(client: Client, operator: User, user: User) -> None:
    client.force_login(operator)
    form = {"user": user.pk, "name": "made here", "token_cap": "", "expires_at_0": "", "expires_at_1": ""}
    answer = client.post("/admin/accounts/apikey/add/", form, follow=True)
    found = re.search(r"sk-acs-[A-Za-z0-9_-]{43}", answer.content.decode())
    assert found is not None
    key = ApiKey.objects.get(digest=digest_of(found[0]))
    assert (key.user, key.name) == (user, "made here")
    for path in ("", f"{key.pk}/change/"):
        assert found[0] not in client.get(f"/admin/accounts/apikey/{path}").content.decode()
    assert client.get(f"/admin/accounts/apikey/{key.pk}/history/").status_code == 200


def test_a_key_does_not_change_hands(client: Client, operator: User, user: User) -> None:
    key, _ = make_key()
    client.force_login(operator)
    form = {"user": user.pk, "name": "renamed", "token_cap": "7", "expires_at_0": "", "expires_at_1": ""}
    assert client.post(f"/admin/accounts/apikey/{key.pk}/change/", form).status_code == 302
    changed = ApiKey.objects.get(pk=key.pk)
    assert (changed.name, changed.token_cap, changed.user) == ("renamed", 7, key.user)
    assert bytes(changed.digest) == bytes(key.digest)


def test_keys_are_paused_resumed_and_revoked_in_the_admin(client: Client, operator: User) -> None:
    key, _ = make_key()
    client.force_login(operator)
    for action, state in (("pause", "paused"), ("resume", "working"), ("revoke", "revoked"), ("resume", "revoked")):
        form = {"action": action, "_selected_action": [key.pk], "confirmed": "yes"}
        assert client.post("/admin/accounts/apikey/", form).status_code == 302
        key.refresh_from_db()
        assert key.state == state


def test_limits_are_set_in_the_admin(client: Client, operator: User, user: User) -> None:
    client.force_login(operator)
    page = client.get(f"/admin/accounts/user/{user.pk}/change/")
    form = {name: value for name, value in page.context["adminform"].form.initial.items() if value is not None}
    form |= {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00", "requests_at_once": "99"}
    form |= {"api_keys-TOTAL_FORMS": "0", "api_keys-INITIAL_FORMS": "0"}
    answer = client.post(f"/admin/accounts/user/{user.pk}/change/", form)
    assert answer.status_code == 302
    user.refresh_from_db()
    assert user.requests_at_once == 99


def test_a_user_is_made_in_the_admin_with_an_address_of_their_own(client: Client, operator: User) -> None:
    client.force_login(operator)
    form = {"username": "ada", "email": "ada@example.org", "usable_password": "false"}
    assert client.post("/admin/accounts/user/add/", form).status_code == 302
    made = User.objects.get(username="ada")
    assert (made.email, made.has_usable_password(), made.is_staff) == ("ada@example.org", False, False)
    again = client.post("/admin/accounts/user/add/", {**form, "username": "bob", "email": "ADA@example.org"})
    assert again.status_code == 200
    assert again.context["adminform"].form.errors == {"email": ["A User with this e-mail address already exists."]}
    assert not User.objects.filter(username="bob").exists()
