"""The admin's site: Django's, with our words for the lists that others bring."""

from typing import Any, ClassVar

from django.contrib.admin import AdminSite
from django.http import HttpRequest


class OperatorSite(AdminSite):
    """What operators see first."""

    _APPS: ClassVar[dict[str, str]] = {"admin": "Audit", "axes": "Sign-ins"}
    _LISTS: ClassVar[dict[str, str]] = {"LogEntry": "Audit log", "AccessAttempt": "Failed sign-ins"}

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        """The apps and their lists."""
        apps: list[Any] = super().get_app_list(request, app_label)
        for app in apps:
            app["name"] = self._APPS.get(app["app_label"], app["name"])
            for model in app["models"]:
                model["name"] = self._LISTS.get(model["object_name"], model["name"])
        return apps
