"""Users and keys in the admin."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db.models import QuerySet
from django.http import HttpRequest

from accounts import invitation_admin as invitation_admin  # registers itself
from accounts import services
from accounts.models import ApiKey, User

admin.site.site_header = admin.site.site_title = "ACS Infra"
admin.site.index_title = "Operators"
admin.site.site_url = "/app"


@admin.register(User)
class UserAdmin(DjangoUserAdmin[User]):
    """A User, with the limits that override the settings'."""

    list_display = ("username", "email", "is_active", "is_staff", "date_joined", "last_login")
    fieldsets = (
        *(DjangoUserAdmin.fieldsets or ()),
        (
            "Limits",
            {
                "description": "Empty: the setting of the same name.",
                "fields": (
                    "requests_at_once",
                    "requests_queued",
                    "requests_per_minute",
                    "jobs_unfinished",
                    "jobs_running",
                    "harvests_unfinished",
                    "harvests_per_month",
                    "harvest_waits_at_once",
                    "storage_quota_bytes",
                ),
            },
        ),
    )
    add_fieldsets = (
        (None, {"classes": ("wide",), "fields": ("username", "email", "usable_password", "password1", "password2")}),
    )


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin[ApiKey]):
    """Keys: the text of a new one is shown once, in the message after saving."""

    list_display = ("name", "prefix", "user", "key_state", "created_at", "expires_at", "last_used_at")
    list_select_related = ("user",)
    list_filter = ("paused_at", "revoked_at")
    search_fields = ("name", "prefix", "user__username", "user__email")
    autocomplete_fields = ("user",)
    actions = ("pause", "resume", "revoke")
    fields = ("user", "name", "token_cap", "expires_at")
    readonly_fields = ("prefix", "key_state", "created_at", "last_used_at", "paused_at", "revoked_at")

    @admin.display(description="state")
    def key_state(self, key: ApiKey) -> str:
        """`working`, `paused`, `expired` or `revoked`."""
        return key.state

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        """A new key has only what is asked for."""
        return ("user", "name", "token_cap", "expires_at", *(self.readonly_fields if obj else ()))

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        """A key does not change hands."""
        return (*self.readonly_fields, "user") if obj else ()

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Save changes; make a new key and show its text."""
        if change:
            super().save_model(request, obj, form, change)
            return
        key, text = services.create_key(
            user=obj.user, name=obj.name, token_cap=obj.token_cap, expires_at=obj.expires_at
        )
        # The admin goes on with the object that it made: it becomes the saved key.
        obj.__dict__.update(key.__dict__)
        self.message_user(request, f"The key, shown this once: {text}", messages.WARNING)

    @admin.action(description="Pause", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        """Refuse the keys until they are resumed."""
        self._for_each(request, queryset, services.pause_key, "paused")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        """Take paused keys again."""
        self._for_each(request, queryset, services.resume_key, "resumed")

    @admin.action(description="Revoke for ever", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        """Refuse the keys for ever."""
        self._for_each(request, queryset, services.revoke_key, "revoked")

    def _for_each(self, request: HttpRequest, queryset: QuerySet[ApiKey], service: Any, done: str) -> None:
        for key in queryset:
            service(key=key)
            self.log_change(request, key, [{"changed": {"fields": [done]}}])
        self.message_user(request, f"Keys {done}: {len(queryset)}.")
