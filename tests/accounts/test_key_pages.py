"""The pages of API keys: made and shown once, changed, paused, revoked, and nobody else's."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone

from accounts.keys import digest_of
from accounts.models import ApiKey, User
from budgets.models import WorkKind
from budgets.services import WorkRef, settle_hold, take_hold
from tests.live_server import make_key, make_user

pytestmark = pytest.mark.django_db

ROUTES = ("", "/pause", "/resume", "/revoke")


@pytest.fixture
def user() -> User:
    return make_user()


@pytest.fixture
def signed_in(client: Client, user: User) -> Client:
    client.force_login(user)
    return client


def test_a_new_key_is_shown_once_with_a_ready_curl(signed_in: Client, user: User) -> None:
    answer = signed_in.post("/app/keys/new", {"name": "node 7", "token_cap": "5000", "last_day": "2999-01-31"})
    assert answer.status_code == 200
    assert "no-store" in answer.headers["Cache-Control"]
    page = answer.content.decode()
    text = re.search(r"sk-acs-[A-Za-z0-9_-]{43}", page)
    assert text is not None
    assert f"ACS_API_KEY={text[0]}" in page
    assert "/models" in page
    key = ApiKey.objects.get(digest=digest_of(text[0]))
    assert (key.user, key.name, key.token_cap) == (user, "node 7", 5000)
    assert key.expires_at == datetime(2999, 2, 1, tzinfo=UTC)
    for path in ("/app/keys", f"/app/keys/{key.pk}", "/app"):
        assert text[0] not in signed_in.get(path).content.decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "x" * 101},
        {"name": "a\0b"},
        {"name": "a\u202eb"},
        {"name": "a", "token_cap": "-1"},
        {"name": "a", "token_cap": "1.5"},
        {"name": "a", "token_cap": "9" * 30},
        {"name": "a", "last_day": "2001-01-01"},
        {"name": "a", "last_day": "9999-12-31"},
        {"name": "a", "last_day": "tomorrow"},
    ],
)
def test_what_makes_no_key_is_said_at_its_field(signed_in: Client, fields: dict[str, str]) -> None:
    answer = signed_in.post("/app/keys/new", fields)
    assert answer.status_code == 200
    assert 'aria-invalid="true"' in answer.content.decode()
    assert not ApiKey.objects.exists()


def test_a_key_is_renamed_paused_resumed_and_revoked(signed_in: Client, user: User) -> None:
    key, _ = make_key(user)
    changed = {"name": "renamed", "token_cap": "7", "last_day": ""}
    assert signed_in.post(f"/app/keys/{key.pk}", changed).status_code == 302
    key.refresh_from_db()
    assert (key.name, key.token_cap, key.expires_at) == ("renamed", 7, None)
    for step, state in (("pause", "paused"), ("resume", "working")):
        assert signed_in.post(f"/app/keys/{key.pk}/{step}").status_code == 302
        key.refresh_from_db()
        assert key.state == state
    assert "for ever" in signed_in.get(f"/app/keys/{key.pk}/revoke").content.decode()
    key.refresh_from_db()
    assert key.state == "working"
    signed_in.post(f"/app/keys/{key.pk}/revoke")
    signed_in.post(f"/app/keys/{key.pk}/resume")
    signed_in.post(f"/app/keys/{key.pk}", {"name": "again"})
    key.refresh_from_db()
    assert (key.state, key.name) == ("revoked", "renamed")


def test_a_name_changed_leaves_the_moment_of_the_end_alone(signed_in: Client, user: User) -> None:
    ends = timezone.now().replace(microsecond=0) + timedelta(days=3, minutes=7)
    key, _ = make_key(user, expires_at=ends)
    shown = signed_in.get(f"/app/keys/{key.pk}").context["form"].initial["last_day"]
    signed_in.post(f"/app/keys/{key.pk}", {"name": "other", "last_day": shown.isoformat()})
    key.refresh_from_db()
    assert (key.name, key.expires_at) == ("other", ends)


def test_the_list_says_what_each_key_used_this_month(signed_in: Client, user: User) -> None:
    key, _ = make_key(user)
    hold = take_hold(user=user, api_key=key, tokens=90_000, work=WorkRef(WorkKind.COMPLETION, "one"))
    settle_hold(hold=hold, tokens=81_234)
    take_hold(user=user, api_key=key, tokens=4_321, work=WorkRef(WorkKind.COMPLETION, "two"))
    page = signed_in.get("/app/keys").content.decode()
    assert "81,234" in page
    assert "4,321 held" in page


def test_another_s_key_is_not_there(signed_in: Client) -> None:
    key, _ = make_key()
    assert key.prefix not in signed_in.get("/app/keys").content.decode()
    for route in ROUTES:
        path = f"/app/keys/{key.pk}{route}"
        assert signed_in.post(path, {"name": "mine"}).status_code == 404
        shown = signed_in.get(path)
        assert shown.status_code == 404 or shown.headers["location"] == "/app/keys"
    key.refresh_from_db()
    assert (key.state, key.name) == ("working", "tests")


def test_key_pages_are_for_people_who_signed_in(client: Client) -> None:
    key, _ = make_key()
    for path in ("/app/keys", "/app/keys/new", *(f"/app/keys/{key.pk}{route}" for route in ROUTES)):
        answer = client.post(path) if path.endswith(("pause", "resume")) else client.get(path)
        assert answer.status_code == 302
        assert answer.headers["location"].startswith("/app/sign-in")
