"""The project's own app: what the other apps share, and the commands that run it."""

from django.apps import AppConfig
from django.contrib.admin import apps as admin_apps


class AcsInfraConfig(AppConfig):
    """Holds `acsinfra.core` and the quickstart."""

    name = "acsinfra"

    def ready(self) -> None:
        """Register the settings' checks, what the OpenAPI document says of our fields, and the count of requests."""
        from acsinfra.core import checks, schema  # noqa: F401
        from acsinfra.core.lifespan import while_serving
        from acsinfra.core.traffic import counting

        while_serving(counting)


class OperatorAdminConfig(admin_apps.AdminConfig):
    """Django's admin, on our site."""

    default = False
    default_site = "acsinfra.core.admin_site.OperatorSite"
