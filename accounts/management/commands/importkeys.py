"""Take over API keys of the old platform."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from accounts import services
from accounts.audit import note_command


class Command(BaseCommand):
    """`manage.py importkeys FILE`."""

    help = "Take over keys from JSON lines of sha256, prefix, user_email, name and cap. May run twice."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with options["file"].open(encoding="utf-8-sig") as lines, transaction.atomic():
                count = services.import_keys(lines=lines)
                said = f"Keys made: {count.made}; here already: {count.present}; Users made: {count.users_made}."
                note_command(said, name="keys of the old platform")
        except OSError as error:
            raise CommandError(f"The file cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise CommandError("The file is not UTF-8.") from None
        except services.ImportFault as fault:
            raise CommandError("Nothing was imported:\n" + "\n".join(fault.faults)) from None
        self.stdout.write(said)
