"""List API keys."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from accounts.management.commands._arguments import find_user
from accounts.models import ApiKey
from accounts.selectors import keys_of
from acsinfra.core.times import iso_utc_ms


class Command(BaseCommand):
    """`manage.py listkeys [USER]`."""

    help = "List API keys, newest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("user", nargs="?", help="Only this User's: a name or e-mail address.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object a line.")

    def handle(self, *args: Any, **options: Any) -> None:
        keys = keys_of(find_user(options["user"])) if options["user"] else ApiKey.objects.all()
        for key in keys.select_related("user"):
            row = {
                "id": key.pk,
                "prefix": key.prefix,
                "state": key.state,
                "user": key.user.username,
                "name": key.name,
                "token_cap": key.token_cap,
                "expires_at": iso_utc_ms(key.expires_at) if key.expires_at else None,
                "last_used_at": iso_utc_ms(key.last_used_at) if key.last_used_at else None,
            }
            if options["json"]:
                self.stdout.write(json.dumps(row))
            else:
                self.stdout.write("  ".join(str(value if value is not None else "-") for value in row.values()))
