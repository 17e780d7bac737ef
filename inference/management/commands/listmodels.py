"""`manage.py listmodels`: the Base models and their engines."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db.models import Count, Q
from django.db.models.functions import Now

from inference.models import BaseModel, Engine


class Command(BaseCommand):
    """One line a model."""

    help = "List the Base models with how many engines each has."

    def handle(self, *args: Any, **options: Any) -> None:
        heard = Q(engines__heartbeat_at__gte=Now() - settings.ENGINE_SILENT_AFTER)
        models = BaseModel.objects.annotate(
            inference_engines=Count("engines", filter=heard & Q(engines__kind=Engine.Kind.INFERENCE)),
            runners=Count("engines", filter=heard & Q(engines__kind=Engine.Kind.RUNNER)),
        )
        for model in models:
            state = "on" if model.is_enabled else "off"
            harvest = "harvest" if model.has_harvest else "no harvest"
            self.stdout.write(
                f"{model.name}\t{state}\t{harvest}\t{model.served_model_name}\t{model.source}\t"
                f"{model.inference_engines} inference, {model.runners} runners"
            )
