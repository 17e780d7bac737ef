"""Completion Jobs."""

from django.apps import AppConfig


class JobsConfig(AppConfig):
    """Completion Jobs."""

    name = "jobs"
