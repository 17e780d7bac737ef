"""The admin's site: Django's, behind the App's own sign-in."""

from typing import Any

from django.contrib.admin import AdminSite
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache


class OperatorSite(AdminSite):
    """For operators alone."""

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
