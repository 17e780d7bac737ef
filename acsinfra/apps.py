"""The project's own app: what the other apps share, and the commands that run it."""

from django.apps import AppConfig


class AcsInfraConfig(AppConfig):
    """Holds `acsinfra.core` and the quickstart."""

    name = "acsinfra"

    def ready(self) -> None:
        """Register the checks of the settings and what the OpenAPI document says of our fields."""
        from acsinfra.core import checks, schema  # noqa: F401
