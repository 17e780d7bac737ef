"""Users, keys, limits, and the import of keys from the old platform."""

import hashlib
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from accounts import services
from accounts.keys import digest_of, is_key_text, new_key_text
from accounts.models import ApiKey, User
from accounts.selectors import limit
from accounts.services import ImportCount, ImportFault, import_keys
from tests.live_server import make_key, make_user

pytestmark = pytest.mark.django_db


def test_a_key_is_long_random_text_of_which_a_hash_is_kept() -> None:
    key, text = make_key()
    assert re.fullmatch(r"sk-acs-[A-Za-z0-9_-]{43}", text)
    assert bytes(key.digest) == hashlib.sha256(text.encode()).digest()
    assert text.startswith(key.prefix)
    kept = json.dumps(ApiKey.objects.filter(pk=key.pk).values().get(), default=repr)
    assert text not in kept
    assert len({new_key_text() for _ in range(1_000)}) == 1_000


@given(st.text())
def test_what_is_hashed_may_be_any_text(text: str) -> None:
    assert len(digest_of(text)) == 32
    assert is_key_text(f"sk-acs-{text}") == (text.isascii() and len(text) <= 193)


def test_states_of_a_key() -> None:
    now = timezone.now()
    past, later = now - timedelta(hours=1), now + timedelta(hours=1)
    assert make_key()[0].state == "working"
    assert make_key(expires_at=later)[0].state == "working"
    assert make_key(expires_at=past)[0].state == "expired"
    assert make_key(paused_at=past)[0].state == "paused"
    assert make_key(paused_at=past, expires_at=past)[0].state == "expired"
    assert make_key(paused_at=past, expires_at=past, revoked_at=past)[0].state == "revoked"


def test_pausing_and_revoking_keep_their_first_time() -> None:
    key, _ = make_key()
    services.pause_key(key=key)
    services.revoke_key(key=key)
    first = (key.paused_at, key.revoked_at)
    assert None not in first
    services.pause_key(key=key)
    services.revoke_key(key=key)
    assert (key.paused_at, key.revoked_at) == first


@pytest.mark.parametrize(
    "fields",
    [{"username": "a b"}, {"username": ""}, {"email": "no address"}, {"email": ""}, {"email": "A@Example.org"}],
)
def test_a_user_needs_a_name_and_an_address_of_their_own(fields: dict[str, Any]) -> None:
    services.create_user(username="ada", email="a@example.org")
    with pytest.raises(ValidationError):
        services.create_user(**{"username": "bob", "email": "b@example.org", **fields})
    assert User.objects.count() == 1


def test_a_user_without_a_password_cannot_sign_in() -> None:
    assert not services.create_user(username="ada", email="a@example.org").has_usable_password()
    assert services.create_user(username="bob", email="b@example.org", password="a-long-one").check_password(
        "a-long-one"
    )


def test_a_limit_is_the_user_s_or_the_setting(settings: Any) -> None:
    settings.REQUESTS_AT_ONCE, settings.HARVESTS_PER_MONTH = 16, None
    assert limit(make_user(), "requests_at_once") == 16
    assert limit(make_user(requests_at_once=3), "requests_at_once") == 3
    assert limit(make_user(requests_at_once=0), "requests_at_once") == 0
    assert limit(make_user(), "harvests_per_month") is None


OLD_KEY = "acs-bm-an-old-key"
ROW = {
    "sha256": hashlib.sha256(OLD_KEY.encode()).hexdigest(),
    "prefix": "acs-bm-an-o",
    "user_email": "Ada@Example.org",
    "name": "laptop",
    "cap": 1000,
}


def line(**changes: Any) -> str:
    return json.dumps({**ROW, **changes})


def other(number: int, **changes: Any) -> str:
    return line(sha256=hashlib.sha256(str(number).encode()).hexdigest(), **changes)


def test_an_import_makes_keys_and_the_users_they_need() -> None:
    known = make_user(email="bob@example.org")
    count = import_keys(lines=[line(), "\n", other(1, user_email="BOB@example.org", cap=None), other(2)])
    assert count == ImportCount(made=3, present=0, users_made=1)
    key = ApiKey.objects.get(digest=digest_of(OLD_KEY))
    assert (key.name, key.prefix, key.token_cap, key.user.email) == ("laptop", "acs-bm-an-o", 1000, "ada@example.org")
    assert not key.user.has_usable_password()
    assert key.user.api_keys.count() == 2
    assert known.api_keys.get().token_cap is None


def test_an_import_takes_addresses_that_are_no_usernames_and_usernames_that_are_taken() -> None:
    taken = make_user(username="carol@example.org", email="other@example.org")
    import_keys(lines=[other(1, user_email="o'brien&x@example.org"), other(2, user_email="carol@example.org")])
    made = User.objects.exclude(pk=taken.pk).order_by("email")
    assert [(user.email, user.username) for user in made] == [
        ("carol@example.org", "carol@example.org-2"),
        ("o'brien&x@example.org", "o_brien_x@example.org"),
    ]


def test_a_second_import_changes_nothing() -> None:
    import_keys(lines=[line()])
    key = ApiKey.objects.get()
    services.pause_key(key=key)
    assert import_keys(lines=[line(name="renamed", cap=1), other(1)]) == ImportCount(made=1, present=1, users_made=0)
    kept = ApiKey.objects.get(pk=key.pk)
    assert (kept.name, kept.token_cap, kept.state) == ("laptop", 1000, "paused")
    assert import_keys(lines=[]) == ImportCount(made=0, present=0, users_made=0)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (line(extra=1), "unknown field 'extra'"),
        (json.dumps({name: value for name, value in ROW.items() if name != "name"}), "name is missing"),
        (line(sha256="abc"), "sha256 must be 64 hex digits"),
        (line(sha256="g" * 64), "sha256 must be 64 hex digits"),
        (line(sha256="٠" * 64), "sha256 must be 64 hex digits"),
        (line(sha256=5), "sha256 must be 64 hex digits"),
        (line(prefix=""), "prefix must be"),
        (line(prefix="p" * 21), "prefix must be"),
        (line(name="a\x00b"), "name must be"),
        (line(name="\ud800"), "name must be"),
        (line(name=None), "name must be"),
        (line(user_email="nobody"), "no e-mail address"),
        (line(user_email="a@" + "b" * 200 + ".org"), "user_email must be"),
        (line(cap=-1), "cap must be"),
        (line(cap=1.5), "cap must be"),
        (line(cap=True), "cap must be"),
        (line(cap=10**30), "cap must be"),
        (line(), "stands on a line above"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_imported(bad: str, told: str) -> None:
    with pytest.raises(ImportFault) as caught:
        import_keys(lines=[line(), other(1), bad])
    [fault] = caught.value.faults
    assert fault.startswith("line 3: ")
    assert told in fault
    assert ApiKey.objects.count() == User.objects.count() == 0


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ImportFault) as caught:
        import_keys(lines=["x", line(), "y"])
    assert [fault[:7] for fault in caught.value.faults] == ["line 1:", "line 3:"]


def test_a_key_of_another_user_is_not_taken_over() -> None:
    import_keys(lines=[line()])
    with pytest.raises(ImportFault, match="belongs to another User"):
        import_keys(lines=[line(user_email="eve@example.org")])
    assert User.objects.count() == 1
