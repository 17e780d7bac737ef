"""Revoke an API key."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction

from accounts import services
from accounts.audit import note_command
from accounts.management.commands._arguments import add_key_argument, find_key


class Command(BaseCommand):
    """`manage.py revokekey KEY`."""

    help = "Refuse an API key for ever."

    def add_arguments(self, parser: CommandParser) -> None:
        add_key_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        key = find_key(options["key"])
        with transaction.atomic():
            services.revoke_key(key=key)
            note_command("Revoked.", on=key)
        self.stdout.write(f"Key {key.pk} of {key.user.username} is {key.state}.")
