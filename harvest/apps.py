"""Harvest jobs."""

from django.apps import AppConfig


class HarvestConfig(AppConfig):
    """Harvest jobs."""

    name = "harvest"
