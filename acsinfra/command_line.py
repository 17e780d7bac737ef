"""`manage.py`'s way to say what is wrong around a command in a sentence: a traceback of Django teaches nobody."""

import sys
from collections.abc import Sequence

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from django.db import InterfaceError, OperationalError, ProgrammingError

UNDEFINED = {"42P01", "42703"}  # PostgreSQL: no such table, no such column


def run(arguments: Sequence[str]) -> None:
    """Run a management command; settings and a database that it can't work with end it with a message and status 1.

    `--traceback` shows where it came from, as it does for a command's own errors.
    """
    try:
        execute_from_command_line(list(arguments))
    except UnicodeEncodeError:
        # Bytes of the command line that are no UTF-8 come as lone surrogates, which no text in the database may hold.
        if "--traceback" in arguments or all(map(_is_text, arguments)):
            raise
        sys.exit("An argument is not UTF-8.")
    except (ImproperlyConfigured, InterfaceError, OperationalError, ProgrammingError) as error:
        message = _explain(error)
        if message is None or "--traceback" in arguments:
            raise
        sys.exit(message)


def _is_text(argument: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _explain(error: Exception) -> str | None:
    """Return what to do about `error`, or None for a fault of the program."""
    if isinstance(error, ImproperlyConfigured):
        return _explain_no_database() if "settings.DATABASES" in str(error) else str(error)
    if isinstance(error, ProgrammingError):
        if getattr(error.__cause__, "sqlstate", None) not in UNDEFINED:
            return None
        return "The database is of another version of this project. Bring it up to date: manage.py migrate"
    reason = " ".join(str(error).split())
    if getattr(error.__cause__, "sqlstate", None):
        return f"The database refused: {reason}."
    return f"The database can't be reached: {reason}. Start what DATABASE_URL names; {_name_the_home()}."


def _explain_no_database() -> str:
    start = "Start a quickstart (manage.py quickstart)"
    return f"DATABASE_URL is missing or is not PostgreSQL. {start}, or {_name_the_home()}."


def _name_the_home() -> str:
    return f"for a quickstart in another folder than {settings.HOME}, name that in ACSINFRA_HOME"
