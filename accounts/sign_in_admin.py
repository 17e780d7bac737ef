"""Failed sign-ins in the admin: who is locked out, and the way to let them in again."""

from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest

from accounts.models import browser_name
from acsinfra.core.admin import PlatformAdmin, operator_action

_Attempt = apps.get_model("axes", "AccessAttempt")
admin.site.unregister(_Attempt)


@admin.register(_Attempt)
class FailedSignInAdmin(PlatformAdmin[Any]):
    """Names and addresses with failures since their last success; what the forms held is shown to nobody."""

    list_display = ("attempt_time", "username", "ip_address", "browser", "failures_since_start", "is_locked_out")
    list_filter = ("attempt_time",)
    search_fields = ("username", "ip_address")
    search_help_text = "Part of a name or of an address."
    ordering = ("-attempt_time",)
    fields = list_display
    actions = ("forgive",)

    @admin.display(description="browser")
    def browser(self, attempt: Any) -> str:
        """The browser in words."""
        return browser_name(attempt.user_agent)

    @admin.display(boolean=True, description="reached the limit")
    def is_locked_out(self, attempt: Any) -> bool:
        """Whether there were as many as lock a name or an address out for a while."""
        return bool(attempt.failures_since_start >= settings.AXES_FAILURE_LIMIT)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: the guard of sign-ins writes these rows."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False

    @operator_action("Let in again", permission="delete", on_its_page=False)
    def forgive(self, request: HttpRequest, attempt: Any) -> str | None:
        """Forget the failures: the name and the address may try again at once."""
        deleted, _ = type(attempt).objects.filter(pk=attempt.pk).delete()
        return "Let in again." if deleted else None
