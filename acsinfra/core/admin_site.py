"""The admin's site: Django's, with our words for the lists that others bring."""

from typing import Any, ClassVar

from django.contrib.admin import AdminSite
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache


class OperatorSite(AdminSite):
    """What operators see first."""

    _APPS: ClassVar[dict[str, str]] = {"admin": "Audit", "axes": "Sign-ins"}
    _LISTS: ClassVar[dict[str, str]] = {"LogEntry": "Audit log", "AccessAttempt": "Failed sign-ins"}

    @method_decorator(never_cache)
    def login(  # type: ignore[override]
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponseBase:
        """The App's sign-in, the one there is; who is signed in and no operator is refused."""
        index = reverse("admin:index", current_app=self.name)
        if self.has_permission(request):
            return redirect(index)
        if request.user.is_authenticated:
            raise PermissionDenied
        return redirect_to_login(request.GET.get("next", index))

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        """The apps and their lists."""
        apps: list[Any] = super().get_app_list(request, app_label)
        for app in apps:
            app["name"] = self._APPS.get(app["app_label"], app["name"])
            for model in app["models"]:
                model["name"] = self._LISTS.get(model["object_name"], model["name"])
        return apps
