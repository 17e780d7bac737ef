"""Users, keys and the audit log in the admin. What Budgets have to do with the first two is in `budgets`."""

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html

from accounts import invitation_admin as invitation_admin  # registers itself
from accounts import services
from accounts import sign_in_admin as sign_in_admin  # registers itself
from accounts.audit import COMMAND_LINE
from accounts.invitations import approve_user
from accounts.models import ApiKey, User
from accounts.sign_ins import end_sign_ins
from acsinfra.core.admin import PlatformAdmin, ReadOnly, operator_action, users_like
from acsinfra.core.file_links import base_url

admin.site.site_header = admin.site.site_title = "ACS Infra"
admin.site.index_title = "Operators"
admin.site.site_url = "/app"
# Who may do what is a User's own flags here: fewer places to look at.
admin.site.unregister(Group)
# Of the guard of sign-ins only the locked out are of use; its other tables are switched off, and empty.
admin.site.unregister([apps.get_model("axes", name) for name in ("AccessLog", "AccessFailureLog")])

LIMITS = (
    ("requests_at_once", "requests_queued", "requests_per_minute"),
    ("jobs_unfinished", "jobs_running"),
    ("harvests_unfinished", "harvests_per_month", "harvest_waits_at_once"),
    "storage_quota_bytes",
)


class UserAdmin(PlatformAdmin[User], DjangoUserAdmin[User]):
    """A User, with the limits that override the settings'."""

    list_display = ("username", "email", "state", "is_staff", "date_joined", "last_login")
    list_filter = ("awaits_approval", "is_active", "is_staff")
    search_fields = ("username", "email", "first_name", "last_name")
    search_help_text = "Part of a name or an address."
    ordering = ("username",)
    sortable_by = ("username", "email", "date_joined", "last_login")
    filter_horizontal = ()
    readonly_fields = ("date_joined", "last_login")
    actions = ("approve", "suspend", "sign_out")
    fieldsets = (
        (None, {"fields": (("username", "email"), ("first_name", "last_name"), "password")}),
        ("Access", {"fields": (("is_active", "is_staff", "is_superuser"), ("date_joined", "last_login"))}),
        ("Limits", {"description": "Empty: the setting of the same name.", "fields": LIMITS}),
    )
    add_fieldsets: Any = (
        (None, {"classes": ("wide",), "fields": ("username", "email", "usable_password", "password1", "password2")}),
    )

    @admin.display(description="state", ordering="is_active")
    def state(self, user: User) -> str:
        """Whether requests and sign-ins are taken."""
        if user.username == COMMAND_LINE:
            return "the actor of commands"
        if user.awaits_approval:
            return "awaits approval"
        return "active" if user.is_active else "suspended"

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        """Save; a User who is made active by hand waits for nothing any more."""
        obj.awaits_approval = obj.awaits_approval and not obj.is_active
        super().save_model(request, obj, form, change)

    @operator_action("Approve, or end a suspension")
    def approve(self, request: HttpRequest, user: User) -> str | None:
        """Let the User sign in, and their keys work; who waited for it is told by mail."""
        if approve_user(user=user, sign_in_url=f"{base_url(request)}{reverse('sign-in')}"):
            return "Approved."
        return "Suspension ended." if services.set_active(user=user, is_active=True) else None

    @operator_action(
        "Suspend",
        question="Suspend these Users? They are signed out, and their keys stop at once; work that runs goes on.",
    )
    def suspend(self, request: HttpRequest, user: User) -> str | None:
        """Refuse the User's sign-ins and keys until they are approved again."""
        if user == request.user:
            messages.error(request, "You cannot suspend yourself.")
            return None
        end_sign_ins(user=user)
        return "Suspended." if services.set_active(user=user, is_active=False) else None

    @operator_action("Sign out everywhere", question="End every session of these Users? Their keys go on working.")
    def sign_out(self, request: HttpRequest, user: User) -> str | None:
        """End the User's sessions."""
        return f"Signed out of {ended}." if (ended := end_sign_ins(user=user)) else None


admin.site.register(User, UserAdmin)


class KeyStateFilter(admin.SimpleListFilter):
    """Keys by whether requests with them are taken."""

    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The states of a key."""
        return [(state, state.capitalize()) for state in ("working", "paused", "expired", "revoked")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
        """The keys of the chosen state, as `ApiKey.state` has it."""
        now = timezone.now()
        kept = Q(revoked_at=None)
        fresh = kept & (Q(expires_at=None) | Q(expires_at__gt=now))
        which = {
            "revoked": Q(revoked_at__isnull=False),
            "expired": kept & Q(expires_at__lte=now),
            "paused": fresh & Q(paused_at__isnull=False),
            "working": fresh & Q(paused_at=None),
        }
        return queryset.filter(which[state]) if (state := self.value()) in which else queryset


class ApiKeyAdmin(PlatformAdmin[ApiKey]):
    """Keys: the text of a new one is shown once, in the message after saving."""

    list_display = ("name", "prefix", "user", "key_state", "created_at", "expires_at", "last_used_at")
    list_select_related = ("user",)
    list_filter = (KeyStateFilter,)
    search_fields = ("name", "prefix", "user__username", "user__email")
    search_help_text = "A key's name or the start of its text; a User's name or address."
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

    @operator_action("Pause")
    def pause(self, request: HttpRequest, key: ApiKey) -> str | None:
        """Refuse the key until it is resumed."""
        return _turn(key, services.pause_key, "Paused.")

    @operator_action("Resume")
    def resume(self, request: HttpRequest, key: ApiKey) -> str | None:
        """Take a paused key again."""
        return _turn(key, services.resume_key, "Resumed.")

    @operator_action("Revoke for ever", question="Revoke these keys? Nothing makes a revoked key work again.")
    def revoke(self, request: HttpRequest, key: ApiKey) -> str | None:
        """Refuse the key for ever."""
        return _turn(key, services.revoke_key, "Revoked.")


def _turn(key: ApiKey, service: Callable[..., None], said: str) -> str | None:
    before = (key.paused_at, key.revoked_at)
    service(key=key)
    return said if (key.paused_at, key.revoked_at) != before else None


admin.site.register(ApiKey, ApiKeyAdmin)


@admin.register(LogEntry)
class AuditLogAdmin(ReadOnly, PlatformAdmin[LogEntry]):
    """Who changed what in the admin or by a command, and when. No operator who stands in it can be deleted."""

    list_display = ("action_time", "user", "did", "content_type", "row", "said")
    list_display_links = None
    list_select_related = ("user", "content_type")
    list_filter = ("action_flag", ("content_type", admin.RelatedOnlyFieldListFilter))
    search_fields = ("object_repr",)
    search_help_text = "An operator's name or address; the name or id of what was changed."
    ordering = ("-id",)

    @admin.display(description="did")
    def did(self, entry: LogEntry) -> str:
        """`added`, `changed` or `deleted`."""
        return "added" if entry.is_addition() else "changed" if entry.is_change() else "deleted"

    @admin.display(description="what")
    def row(self, entry: LogEntry) -> str:
        """What was changed, with a link to it."""
        url = None if entry.is_deletion() else entry.get_admin_url()
        return format_html('<a href="{}">{}</a>', url, entry.object_repr) if url else entry.object_repr

    @admin.display(description="how")
    def said(self, entry: LogEntry) -> str:
        """The change in words."""
        return entry.get_change_message()

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[LogEntry], search_term: str
    ) -> tuple[QuerySet[LogEntry], bool]:
        """By the operator or by what was changed."""
        term = search_term.strip()
        if not term or "\0" in term:
            return queryset if not term else queryset.none(), False
        found = Q(user__in=users_like(term)) | Q(object_repr__icontains=term) | Q(object_id=term)
        return queryset.filter(found), False
