"""The audit log of what operators do in a shell: the admin's own log, under one actor, `command line`.

Every management command of ours that changes something calls `note_command`, in the transaction of the change where
that is one (`tests/accounts/test_audit.py` holds all of them to it); `manage.py` notes Django's own that give power.
"""

import getpass
import os
import pwd
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model

from accounts.models import User

# A space is in no name that a person can have: nobody signs up as this, nor signs in, for it has no password.
COMMAND_LINE: Final = "command line"
_EMAIL: Final = "command-line@localhost.invalid"


def note_command(said: str, *, on: Model | None = None, added: bool = False, name: str = "") -> None:
    """Write that a management command did `said` (`Paused.`) to the row `on`, and which account of the system ran it.

    `name` is what it was done to where that is no row.
    """
    LogEntry.objects.create(
        user=_command_line(),
        content_type=None if on is None else ContentType.objects.get_for_model(on),
        object_id=None if on is None else str(on.pk),
        object_repr=(name if on is None else str(on))[:200],
        action_flag=ADDITION if added else CHANGE,
        change_message=f"{said} By {system_account()}.",
    )


def note_djangos_own(arguments: Sequence[str], *, since: datetime) -> None:
    """Write what `createsuperuser` made since then, or whose password `changepassword` changed."""
    command, *rest = arguments
    if command == "createsuperuser":
        for user in User.objects.filter(is_superuser=True, date_joined__gte=since):
            note_command("Added as a superuser.", on=user, added=True)
        return
    name = next((word for word in rest if not word.startswith("-")), getpass.getuser())
    for user in User.objects.filter(username=name):
        note_command("Password changed.", on=user)


def system_account() -> str:
    """The account that runs this process: `ada`, or `ada as root` by way of sudo; a number where it has no name."""
    number = os.getuid()
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:
        name = f"the account {number}"
    # Only root could have set it for root; anybody else may set it to anything.
    sudo = os.environ.get("SUDO_USER", "") if number == 0 else ""
    return f"{sudo} as {name}" if sudo.isprintable() and sudo not in ("", name) else name


def _command_line() -> User:
    user, is_new = User.objects.get_or_create(username=COMMAND_LINE, defaults={"email": _EMAIL, "is_active": False})
    if is_new:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user
