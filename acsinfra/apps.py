"""The project's own app: what the other apps share, and the commands that run it."""

from django.apps import AppConfig


class AcsInfraConfig(AppConfig):
    """Holds `acsinfra.core` and the quickstart."""

    name = "acsinfra"

    def ready(self) -> None:
        """Register the settings' checks, what the OpenAPI document says of our fields, and the count of requests."""
        from acsinfra.core import checks, schema  # noqa: F401
        from acsinfra.core.lifespan import while_serving
        from acsinfra.core.traffic import counting

        while_serving(counting)
