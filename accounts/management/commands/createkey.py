"""Make an API key."""

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from accounts import services
from accounts.audit import note_command
from accounts.management.commands._arguments import find_user, moment


class Command(BaseCommand):
    """`manage.py createkey USER --name NAME`."""

    help = "Make an API key of a User and show it, this once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("user", help="The User's name or e-mail address.")
        parser.add_argument("--name", default="made by an operator", help="What the key is for.")
        parser.add_argument("--cap", type=int, help="Tokens that the key may spend in a month.")
        parser.add_argument("--expires", type=moment, help="An ISO 8601 time, or days from now such as 30d.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["cap"] is not None and options["cap"] < 0:
            raise CommandError("--cap must not be negative.")
        try:
            with transaction.atomic():
                key, text = services.create_key(
                    user=find_user(options["user"]),
                    name=options["name"],
                    token_cap=options["cap"],
                    expires_at=options["expires"],
                )
                note_command("Added.", on=key, added=True)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        if options["json"]:
            self.stdout.write(json.dumps({"id": key.pk, "prefix": key.prefix, "api_key": text}))
        else:
            self.stdout.write(text)
            self.stderr.write(f"Key {key.pk} of {key.user.username}. It cannot be shown again.")
