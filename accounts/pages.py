"""The pages that a User signs in with."""

from typing import Any

from django.conf import settings
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.views import LoginView
from django.views.generic import TemplateView

from accounts.selectors import keys_of


class SignInPage(LoginView):
    """Name and password."""

    template_name = "accounts/sign_in.html"
    redirect_authenticated_user = True


class HomePage(LoginRequiredMixin, TemplateView):
    """Where the API, its documentation and the admin are, and the User's keys."""

    template_name = "accounts/home.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The address of the API and the signed-in User's keys."""
        base = settings.PUBLIC_URL or self.request.build_absolute_uri("/").rstrip("/")
        user: Any = self.request.user
        return super().get_context_data(api_base=f"{base}/v1", api_keys=keys_of(user), **kwargs)
