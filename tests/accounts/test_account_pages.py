"""Accounts begin by invitation or approval, passwords are reset by mail, guessing is throttled, sessions end."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.core import mail
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client
from django.utils import timezone

from accounts.invitations import accept_invitation, approve_user, create_invitation, invitation_path
from accounts.models import Invitation, SignIn, User, browser_name
from accounts.tasks import delete_expired_sessions
from acsinfra.core.mail import mailer_from_url
from acsinfra.core.paths import loggable_path
from tests.live_server import make_user

pytestmark = pytest.mark.django_db

PASSWORD = "correct horse battery"
ACCOUNT = {"username": "grace", "email": "grace@example.org", "password": PASSWORD}


def sign_in(client: Client, name: str, password: str = PASSWORD) -> Any:
    return client.post("/app/sign-in", {"username": name, "password": password})


def key_of(client: Client) -> str:
    key = client.session.session_key
    assert key is not None
    return key


# Invitations and sign-up


def test_an_invitation_makes_one_account_and_signs_it_in(client: Client) -> None:
    _, token = create_invitation(made_by=None)
    path = invitation_path(token)
    assert client.get(path).status_code == 200
    assert client.post(path, ACCOUNT).headers["location"] == "/app"
    user = User.objects.get(username="grace")
    assert (user.is_active, user.is_staff, user.check_password(PASSWORD)) == (True, False, True)
    assert client.get("/app/account").context["user"] == user
    again = Client().post(path, {**ACCOUNT, "username": "eve", "email": "eve@example.org"})
    assert again.status_code == 404
    assert not User.objects.filter(username="eve").exists()
    assert Invitation.objects.get().user == user


def test_an_invitation_for_an_address_is_for_that_one_until_it_is_over(client: Client) -> None:
    invitation, token = create_invitation(made_by=None, email="ada@example.org")
    answer = client.post(invitation_path(token), ACCOUNT)
    assert "This invitation is for ada@example.org." in answer.content.decode()
    assert not User.objects.exists()
    Invitation.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert client.get(invitation_path(token)).status_code == 404
    assert client.get("/app/invitation/none").status_code == 404
    assert bytes(invitation.digest).hex() not in str(invitation)


@pytest.mark.django_db(transaction=True)
def test_of_two_at_once_one_has_the_invitation() -> None:
    _, token = create_invitation(made_by=None)

    def accept(name: str) -> bool:
        try:
            accept_invitation(token=token, username=name, email=f"{name}@example.org", password=PASSWORD)
        except ValidationError:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(accept, "abcd")) == [False, False, False, True]
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"password": "short"}, "too short"),
        ({"password": "grace@example.org"}, "too similar"),
        ({"username": "ada"}, "already exists"),
        ({"email": "ADA@example.org"}, "already exists"),
        ({"username": "a b"}, "valid username"),
        ({"email": "none"}, "valid email"),
    ],
)
def test_an_account_that_cannot_be_is_said_at_its_field(client: Client, changed: dict[str, str], said: str) -> None:
    User.objects.create(username="ada", email="ada@example.org")
    _, token = create_invitation(made_by=None)
    answer = client.post(invitation_path(token), {**ACCOUNT, **changed})
    assert answer.status_code == 200
    assert said in answer.content.decode()
    assert User.objects.count() == 1
    assert Invitation.objects.get().is_open


def test_sign_up_waits_for_an_operator(client: Client, settings: Any) -> None:
    assert client.get("/app/sign-up").status_code == 404
    settings.SIGN_UP = "approval"
    assert "/app/sign-up" in client.get("/app/sign-in").content.decode()
    assert "Thank you" in client.post("/app/sign-up", ACCOUNT).content.decode()
    user = User.objects.get()
    assert (user.is_active, user.awaits_approval) == (False, True)
    assert sign_in(client, "grace").status_code == 200
    assert approve_user(user=user, sign_in_url="https://here.example/app/sign-in")
    assert not approve_user(user=user, sign_in_url="")
    [letter] = mail.outbox
    assert letter.to == ["grace@example.org"]
    assert "https://here.example/app/sign-in" in letter.body
    assert sign_in(client, "grace").status_code == 302


def test_operators_hear_by_mail_of_who_waits(client: Client, settings: Any) -> None:
    settings.SIGN_UP, settings.PUBLIC_URL = "approval", "https://here.example"
    operator = make_user(is_staff=True, is_superuser=True)
    make_user(is_staff=True, is_superuser=True, is_active=False)
    make_user()
    client.post("/app/sign-up", ACCOUNT)
    settings.OPERATOR_EMAILS = ["lab@example.org", "desk@example.org"]
    client.post("/app/sign-up", {**ACCOUNT, "username": "eve", "email": "eve@example.org"})
    # One that is refused is nobody's business.
    client.post("/app/sign-up", {**ACCOUNT, "username": "eve"})
    first, second = mail.outbox
    assert (first.to, second.to) == ([operator.email], ["lab@example.org", "desk@example.org"])
    assert "eve (eve@example.org)" in second.body
    assert PASSWORD not in second.body
    url = re.search(r"https://here\.example(/admin/\S+)", str(first.body))
    assert url is not None
    client.force_login(operator)
    assert {user.username for user in client.get(url[1]).context["cl"].result_list} == {"grace", "eve"}


def test_a_sign_up_stands_where_its_mail_cannot_go(client: Client, settings: Any) -> None:
    settings.SIGN_UP, settings.OPERATOR_EMAILS = "approval", ["lab@example.org"]
    settings.MAILERS = {"default": mailer_from_url("smtp://127.0.0.1:1")}
    assert "Thank you" in client.post("/app/sign-up", ACCOUNT).content.decode()
    assert User.objects.get().awaits_approval


def test_a_closed_house_has_no_way_in(client: Client, settings: Any) -> None:
    _, token = create_invitation(made_by=None)
    settings.SIGN_UP = "closed"
    assert client.get(invitation_path(token)).status_code == 404
    with pytest.raises(CommandError, match="closed"):
        call_command("invite")


def test_an_operator_invites_from_a_shell(client: Client, settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.PUBLIC_URL = "https://here.example"
    call_command("invite", "grace@example.org", days=2)
    url = capsys.readouterr().out.strip()
    assert url.startswith("https://here.example/app/invitation/")
    assert client.get(url.removeprefix("https://here.example")).status_code == 200
    with pytest.raises(CommandError):
        call_command("invite", "no address")


def test_an_operator_invites_in_the_admin(client: Client) -> None:
    client.force_login(make_user(is_staff=True, is_superuser=True))
    form = {"email": "", "expires_at_0": "2999-01-01", "expires_at_1": "00:00:00"}
    page = client.post("/admin/accounts/invitation/add/", form, follow=True).content.decode()
    link = re.search(r"http://testserver(/app/invitation/[\w-]+)", page)
    assert link is not None
    assert Client().get(link[1]).status_code == 200
    invitation = Invitation.objects.get()
    assert invitation.expires_at.year == 2999
    for path in ("", f"{invitation.pk}/change/"):
        assert link[1] not in client.get(f"/admin/accounts/invitation/{path}").content.decode()


# Passwords


def test_a_password_is_reset_by_mail_and_every_session_ends(client: Client) -> None:
    user = make_user(password="something old")
    elsewhere = Client()
    elsewhere.force_login(user)
    client.post("/app/password/reset", {"email": user.email.upper()})
    [letter] = mail.outbox
    path = re.search(r"http://testserver(/app/password/set/\S+)", str(letter.body))
    assert path is not None
    form = client.get(path[1], follow=True)
    new = {"new_password1": PASSWORD, "new_password2": PASSWORD}
    assert client.post(form.request["PATH_INFO"], new).headers["location"] == "/app/sign-in"
    assert elsewhere.get("/app").status_code == 302
    assert sign_in(client, user.username).status_code == 302
    assert "This link no longer works" in Client().get(path[1], follow=True).content.decode()


def test_asking_for_a_reset_does_not_say_who_has_an_account(client: Client) -> None:
    user = make_user()
    User.objects.filter(pk=user.pk).update(is_active=False)
    for email in (user.email, "nobody@example.org"):
        answer = client.post("/app/password/reset", {"email": email})
        assert answer.headers["location"] == "/app/password/reset/sent"
    assert mail.outbox == []


def test_a_changed_password_ends_the_other_sessions(client: Client) -> None:
    user = make_user(password="something old")
    elsewhere = Client()
    elsewhere.force_login(user)
    sign_in(client, user.username, "something old")
    form = {"old_password": "something old", "new_password1": PASSWORD, "new_password2": PASSWORD}
    assert client.post("/app/password", form).headers["location"] == "/app/account"
    assert client.get("/app/account").status_code == 200
    assert elsewhere.get("/app").status_code == 302
    assert [one.pk for one in SignIn.objects.filter(user=user)] == [client.session.session_key]


def test_guessing_is_locked_out_by_name_and_by_address(client: Client, settings: Any) -> None:
    settings.AXES_FAILURE_LIMIT = 3
    user, other = make_user(password=PASSWORD), make_user(password=PASSWORD)
    assert [sign_in(client, user.username, "wrong").status_code for _ in range(3)] == [200, 200, 429]
    locked = sign_in(client, user.username)
    assert (locked.status_code, "Too many tries" in locked.content.decode()) == (429, True)
    assert sign_in(client, other.username).status_code == 429
    elsewhere = Client(REMOTE_ADDR="192.0.2.7")
    assert sign_in(elsewhere, user.username).status_code == 429
    assert sign_in(elsewhere, other.username).status_code == 302

    # An operator lets them in again.
    operator = Client()
    operator.force_login(make_user(is_staff=True, is_superuser=True))
    listed = operator.get("/admin/axes/accessattempt/")
    assert "Select failed sign-in to view" in listed.content.decode()
    attempts = [row.pk for row in listed.context["cl"].result_list]
    assert operator.get(f"/admin/axes/accessattempt/{attempts[0]}/change/").status_code == 200
    operator.post("/admin/axes/accessattempt/", {"action": "forgive", "_selected_action": attempts})
    assert sign_in(client, user.username).status_code == 302


# Sessions


def test_sessions_are_listed_and_ended(client: Client) -> None:
    user, other = make_user(password=PASSWORD), make_user()
    laptop, phone, stranger = Client(headers={"User-Agent": "Firefox Linux"}), Client(), Client()
    for one in (laptop, phone):
        one.force_login(user)
    stranger.force_login(other)
    sign_in(client, user.username)
    page = client.get("/app/account")
    assert len(page.context["sessions"]) == 3
    assert "this one" in page.content.decode()
    name = key_of(laptop)[:12]
    client.post("/app/account/end-session", {"session": name})
    assert [one.get("/app").status_code for one in (laptop, phone, client)] == [302, 200, 200]
    # Nobody ends what is another's, by whatever name.
    client.post("/app/account/end-session", {"session": key_of(stranger)[:12]})
    assert stranger.get("/app").status_code == 200
    client.post("/app/account/end-session")
    assert [one.get("/app").status_code for one in (phone, client, stranger)] == [302, 200, 200]
    client.post("/app/sign-out")
    assert not SignIn.objects.filter(user=user).exists()


def test_expired_sessions_are_deleted(client: Client) -> None:
    client.force_login(make_user())
    delete_expired_sessions()
    assert SignIn.objects.count() == 1
    Session.objects.update(expire_date=timezone.now() - timedelta(seconds=1))
    delete_expired_sessions()
    assert (Session.objects.count(), SignIn.objects.count()) == (0, 0)


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "Firefox on Linux"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/150.0 Safari/537.36 Edg/150.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) Version/19.0 Safari/605.1", "Safari on iOS"),
        ("curl/8", "A browser"),
    ],
)
def test_a_browser_is_named_in_words(agent: str, name: str) -> None:
    assert browser_name(agent) == name


# What mail and logs are told


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtp://a:p%40ss@mail.example", {"port": 587, "use_tls": True, "use_ssl": False, "password": "p@ss"}),
        ("smtps://mail.example", {"port": 465, "use_tls": False, "use_ssl": True, "username": ""}),
        ("smtp://localhost", {"port": 25, "use_tls": False}),
        ("file:///var/mail%20box", {"file_path": "/var/mail box"}),
    ],
)
def test_mail_goes_where_its_url_says(url: str, expected: dict[str, Any]) -> None:
    options = mailer_from_url(url)["OPTIONS"]
    assert {name: options[name] for name in expected} == expected


def test_logs_do_not_hold_what_opens_an_account() -> None:
    assert loggable_path("/app/invitation/secret") == "/app/invitation/…"
    assert loggable_path("/app/password/set/MQ/secret") == "/app/password/set/…"
    assert loggable_path("/files/secret/manifest.json") == "/files/…"
    assert loggable_path("/app/keys/7") == "/app/keys/7"
