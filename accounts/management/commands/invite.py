"""Make an invitation."""

from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from accounts.audit import note_command
from accounts.invitations import DAYS, create_invitation, invitation_path


class Command(BaseCommand):
    """`manage.py invite [EMAIL]`."""

    help = "Print a link with which one person makes an account, once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email", nargs="?", default="", help="The address that the account must have; else any.")
        parser.add_argument("--days", type=float, default=DAYS, help=f"How long it works; {DAYS} by default.")

    def handle(self, *args: Any, **options: Any) -> None:
        if settings.SIGN_UP == "closed":
            raise CommandError("SIGN_UP is closed: set it to invite or approval, or use createuser.")
        if not 0 < options["days"] <= 365:
            raise CommandError("--days must be more than 0 and at most 365.")
        try:
            with transaction.atomic():
                invitation, token = create_invitation(made_by=None, email=options["email"], days=options["days"])
                note_command("Added.", on=invitation, added=True)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        self.stdout.write(f"{settings.PUBLIC_URL}{invitation_path(token)}")
