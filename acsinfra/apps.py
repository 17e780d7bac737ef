"""The project's own app: what the other apps share, and the commands that run it."""

from typing import ClassVar

from django.apps import AppConfig, apps
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
    """Django's admin, on our site, with our words for the lists that others bring."""

    default = False
    default_site = "acsinfra.core.admin_site.OperatorSite"
    verbose_name = "Audit"
    _LISTS: ClassVar[dict[str, tuple[str, str]]] = {
        "admin.LogEntry": ("entry of the audit log", "entries of the audit log"),
        "axes.AccessAttempt": ("failed sign-in", "failed sign-ins"),
    }

    def ready(self) -> None:
        """Register every admin, and name the lists: what a migration compares is left as it is."""
        super().ready()
        apps.get_app_config("axes").verbose_name = "Sign-ins"
        for model, names in self._LISTS.items():
            options = apps.get_model(model)._meta
            options.verbose_name, options.verbose_name_plural = names
