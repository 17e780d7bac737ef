"""Make a User."""

import getpass
import sys
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from accounts import services
from accounts.audit import note_command


class Command(BaseCommand):
    """`manage.py createuser NAME EMAIL`."""

    help = "Make a User. An operator with all rights is made by createsuperuser."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("email")
        parser.add_argument(
            "--password-stdin", action="store_true", help="Read the password from standard input instead of asking."
        )
        parser.add_argument("--no-password", action="store_true", help="The User cannot sign in, only hold keys.")

    def handle(self, *args: Any, **options: Any) -> None:
        password = None
        if not options["no_password"]:
            password = _read_password(from_stdin=options["password_stdin"])
        try:
            if password is not None:
                validate_password(password)
            with transaction.atomic():
                user = services.create_user(username=options["name"], email=options["email"], password=password)
                note_command("Added.", on=user, added=True)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        self.stdout.write(f"User {user.username} made.")


def _read_password(*, from_stdin: bool) -> str:
    if from_stdin:
        return sys.stdin.readline().rstrip("\n")
    try:
        return getpass.getpass()
    except EOFError:
        raise CommandError("No password was given: use --password-stdin or --no-password.") from None
