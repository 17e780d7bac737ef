"""What an operator types."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from accounts.keys import digest_of
from accounts.models import ApiKey, User
from tests.accounts.test_services import ROW
from tests.live_server import make_key, make_user

pytestmark = pytest.mark.django_db


def run(*arguments: Any) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def test_createuser_reads_a_password_and_refuses_a_weak_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse battery\n"))
    run("createuser", "ada", "ada@example.org", "--password-stdin")
    assert User.objects.get(username="ada").check_password("correct horse battery")
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    with pytest.raises(CommandError, match="too short"):
        run("createuser", "bob", "bob@example.org", "--password-stdin")
    with pytest.raises(CommandError, match="already exists"):
        run("createuser", "ada", "ada2@example.org", "--no-password")
    assert User.objects.filter(email__startswith="ada").count() == 1


def test_createkey_prints_a_key_that_works() -> None:
    user = make_user()
    text = run("createkey", user.username, "--name", "laptop", "--cap", "5000", "--expires", "30d").strip()
    key = ApiKey.objects.get(digest=digest_of(text))
    assert (key.user, key.name, key.token_cap, key.state) == (user, "laptop", 5000, "working")
    assert key.expires_at is not None
    assert 29.9 < (key.expires_at - key.created_at).total_seconds() / 86_400 <= 30
    made = json.loads(run("createkey", user.email.upper(), "--json"))
    assert ApiKey.objects.get(digest=digest_of(made["api_key"])).pk == made["id"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nobody",), "No User"),
        (("ada", "--cap", "-1"), "negative"),
        (("ada", "--cap", str(10**30)), "9223372036854775807"),
        (("ada", "--expires", "yesterday"), "ISO 8601"),
        (("ada", "--expires", "2001-01-01"), "is over"),
        (("ada", "--expires", "99999999999d"), "ISO 8601"),
        (("ada", "--expires", "9999-12-31T23:59:59-14:00"), "ISO 8601"),
        (("ada", "--name", "n" * 101), "at most 100"),
    ],
)
def test_createkey_says_what_is_wrong(arguments: tuple[str, ...], told: str) -> None:
    run("createuser", "ada", "ada@example.org", "--no-password")
    with pytest.raises(CommandError, match=told):
        run("createkey", *arguments)
    assert ApiKey.objects.count() == 0


def test_pause_resume_and_revoke_by_id_or_text() -> None:
    key, text = make_key()
    for named, command, state in (
        (str(key.pk), "pausekey", "paused"),
        (text, "resumekey", "working"),
        (key.prefix, "revokekey", "revoked"),
        (key.prefix, "resumekey", "revoked"),
    ):
        assert f"is {state}." in run(command, named)
        key.refresh_from_db()
        assert key.state == state
    for nobody in ("sk-acs-nobody1", "999999", "", "sk", text[:-1], f"{text}x", key.prefix[:-1]):
        with pytest.raises(CommandError, match="No key"):
            run("pausekey", nobody)
    assert text not in run("listkeys")


def test_a_prefix_of_two_keys_names_neither() -> None:
    for _ in range(2):
        make_key(prefix="acs-bm-aaaaa")
    with pytest.raises(CommandError, match="More than one"):
        run("revokekey", "acs-bm-aaaaa")
    assert not ApiKey.objects.exclude(revoked_at=None).exists()


def test_listkeys_shows_all_or_one_user_s() -> None:
    (first, _), (second, _) = make_key(), make_key()
    rows = [json.loads(row) for row in run("listkeys", "--json").splitlines()]
    assert {row["id"] for row in rows} == {first.pk, second.pk}
    [row] = [json.loads(row) for row in run("listkeys", first.user.username, "--json").splitlines()]
    assert (row["id"], row["state"], row["last_used_at"]) == (first.pk, "working", None)
    assert first.prefix in run("listkeys")


def test_importkeys_reads_a_file_and_tells_of_bad_ones(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    assert run("importkeys", file) == "Keys made: 1; here already: 0; Users made: 1.\n"
    assert run("importkeys", file) == "Keys made: 0; here already: 1; Users made: 0.\n"
    file.write_text("{\n")
    with pytest.raises(CommandError, match="line 1: it is not JSON"):
        run("importkeys", file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CommandError, match="not UTF-8"):
        run("importkeys", file)
    for unreadable in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CommandError, match="cannot be read"):
            run("importkeys", unreadable)
