"""`manage.py disablemodel NAME`: switch a Base model off."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from accounts.audit import note_command
from inference.models import BaseModel
from inference.services import set_enabled


class Command(BaseCommand):
    """Takes effect in every API process within a second."""

    help = "Switch a Base model off."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        model = BaseModel.objects.filter(name=options["name"]).first()
        if model is None:
            raise CommandError(f"There is no model {options['name']}.")
        with transaction.atomic():
            set_enabled(model=model, enabled=False)
            note_command("Switched off.", on=model)
        self.stdout.write(f"{model.name} is off.")
