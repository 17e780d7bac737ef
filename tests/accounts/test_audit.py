"""What operators do in a shell stands in the audit log, beside what they do in the admin."""

import io
import json
import pwd
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command, get_commands
from django.test import Client
from django.utils import timezone

from accounts import audit
from accounts.models import Invitation, User
from tests.accounts.test_services import ROW
from tests.live_server import make_key, make_user

pytestmark = pytest.mark.django_db

RECORDED = {"createuser", "createkey", "importkeys", "invite", "pausekey", "resumekey", "revokekey"} | {
    "addmodel",
    "enablemodel",
    "disablemodel",
}
# What they start writes rows of its own, or they only read.
OTHERS = {"bench", "chaos", "inference", "quickstart", "runner", "scheduler", "listkeys", "listmodels"}


def run(*arguments: Any, **options: Any) -> None:
    call_command(*arguments, stdout=io.StringIO(), stderr=io.StringIO(), **options)


def said() -> list[tuple[str, str]]:
    """What the log has, oldest first: of what, and what was done, without who did it."""
    entries = list(LogEntry.objects.order_by("pk").select_related("user"))
    assert {entry.user.username for entry in entries} <= {audit.COMMAND_LINE}
    end = f" By {audit.system_account()}."
    assert all(entry.change_message.endswith(end) for entry in entries)
    return [(entry.object_repr, entry.change_message.removesuffix(end)) for entry in entries]


def test_every_command_of_ours_is_recorded_or_changes_nothing() -> None:
    ours = {name for name, app in get_commands().items() if (Path(settings.BASE_DIR) / str(app)).is_dir()}
    assert ours == RECORDED | OTHERS
    for name in RECORDED:
        [file] = Path(settings.BASE_DIR).glob(f"*/management/commands/{name}.py")
        assert "note_command(" in file.read_text(), name


def test_keys_users_and_invitations(tmp_path: Path) -> None:
    key, text = make_key()
    for command in ("pausekey", "resumekey", "revokekey"):
        run(command, text)
    assert said() == [(str(key), "Paused."), (str(key), "Resumed."), (str(key), "Revoked.")]
    LogEntry.objects.all().delete()
    run("createuser", "ada", "ada@example.org", "--no-password")
    run("createkey", "ada", "--name", "new")
    run("invite", "grace@example.org")
    file = tmp_path / "keys.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    run("importkeys", file)
    made = User.objects.get(username="ada")
    assert said() == [
        ("ada", "Added."),
        (str(made.api_keys.get(name="new")), "Added."),
        (str(Invitation.objects.get()), "Added."),
        ("keys of the old platform", "Keys made: 1; here already: 0; Users made: 0."),
    ]
    assert [entry.is_addition() for entry in LogEntry.objects.order_by("pk")] == [True, True, True, False]


def test_models(tiny_model: Path) -> None:
    run("addmodel", "tiny", "--source", tiny_model, "--dtype", "float32")
    run("disablemodel", "tiny")
    run("enablemodel", "tiny")
    run("addmodel", "tiny", "--update", "--max-num-seqs", "7")
    (_, first), (_, off), (_, on), (name, changed) = said()
    assert (first, off, on, name) == ("Added.", "Switched off.", "Switched on.", "tiny")
    assert changed.startswith("Files read again; max_num_seqs: ")
    assert changed.endswith(" → 7.")


def test_djangos_own_commands_that_give_power() -> None:
    """`manage.py` notes them when they are done; another superuser is not taken for the new one."""
    make_user(is_superuser=True)
    since = timezone.now()
    audit.note_djangos_own(["createsuperuser", "--noinput"], since=since)
    assert said() == []
    run("createsuperuser", interactive=False, username="root", email="root@example.org")
    audit.note_djangos_own(["createsuperuser", "--noinput"], since=since)
    audit.note_djangos_own(["changepassword", "root"], since=since)
    assert said() == [("root", "Added as a superuser."), ("root", "Password changed.")]


def test_what_failed_is_not_recorded() -> None:
    for arguments in (("createkey", "nobody"), ("pausekey", "nobody"), ("createuser", "a b", "none", "--no-password")):
        with pytest.raises(CommandError):
            run(*arguments)
    assert said() == []


def test_who_ran_it_is_the_account_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ada")
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert audit.system_account() == f"ada as {pwd.getpwuid(0).pw_name}"
    # Nobody but root can be believed about sudo.
    monkeypatch.setattr("os.getuid", lambda: 65_534)
    assert audit.system_account() == pwd.getpwuid(65_534).pw_name
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_001)
    assert audit.system_account() == "the account 4000000001"


def test_the_actor_is_nobody_who_can_come_in(client: Client) -> None:
    key, text = make_key()
    run("pausekey", text)
    actor = User.objects.get(username=audit.COMMAND_LINE)
    assert not actor.is_active
    assert not actor.has_usable_password()
    operator = make_user(is_staff=True, is_superuser=True)
    client.force_login(operator)
    page = client.get("/admin/admin/logentry/?q=command+line").content.decode()
    assert str(key) in page
    assert f"Paused. By {audit.system_account()}." in page
    assert "the actor of commands" in client.get("/admin/accounts/user/").content.decode()
