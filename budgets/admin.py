"""The money in the admin: limits can be set, all else is read."""

from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from budgets import spend_admin  # noqa: F401 (registers its own)
from budgets.limits import set_monthly_tokens
from budgets.models import Budget, Hold, KeyUse, LedgerEntry, MonthlyLimit


class _ReadOnly:
    """The services alone write these rows."""

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


@admin.register(MonthlyLimit)
class MonthlyLimitAdmin(admin.ModelAdmin[MonthlyLimit]):
    """Users whose monthly tokens differ from the setting."""

    list_display = ("user", "monthly_tokens")
    list_select_related = ("user",)
    search_fields = ("user__username", "user__email")
    autocomplete_fields = ("user",)

    def get_readonly_fields(self, request: HttpRequest, obj: MonthlyLimit | None = None) -> tuple[str, ...]:
        """A limit does not change hands."""
        return ("user",) if obj else ()

    def save_model(self, request: HttpRequest, obj: MonthlyLimit, form: Any, change: bool) -> None:
        """Set the limit, in the present month too."""
        set_monthly_tokens(user=obj.user, monthly_tokens=obj.monthly_tokens)
        obj._state.adding = False

    def delete_model(self, request: HttpRequest, obj: MonthlyLimit) -> None:
        """Go back to the setting, in the present month too."""
        set_monthly_tokens(user=obj.user, monthly_tokens=None)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[MonthlyLimit]) -> None:
        """Go back to the setting for each."""
        for obj in queryset:
            self.delete_model(request, obj)


class KeyUseInline(_ReadOnly, admin.TabularInline[KeyUse, Budget]):
    """What each key used of a Budget."""

    model = KeyUse
    fields = ("api_key", "prefix", "cap", "used", "held")
    extra = 0


@admin.register(Budget)
class BudgetAdmin(_ReadOnly, admin.ModelAdmin[Budget]):
    """The Budgets of each month."""

    list_display = ("user", "month", "token_limit", "used", "held")
    list_select_related = ("user",)
    list_filter = ("month",)
    search_fields = ("user__username", "user__email")
    date_hierarchy = "month"
    ordering = ("-month", "user")
    inlines = (KeyUseInline,)


@admin.register(Hold)
class HoldAdmin(_ReadOnly, admin.ModelAdmin[Hold]):
    """The Holds, live and ended."""

    list_display = ("work_kind", "work_id", "user", "tokens", "state", "charged", "taken_at", "ended_at")
    list_select_related = ("budget__user", "key_use")
    list_filter = ("state", "work_kind")
    search_fields = ("work_id", "budget__user__username", "budget__user__email")
    ordering = ("-id",)
    show_full_result_count = False

    @admin.display(description="user")
    def user(self, hold: Hold) -> str:
        """Whose Budget it is in."""
        return str(hold.budget.user)


@admin.register(LedgerEntry)
class LedgerEntryAdmin(_ReadOnly, admin.ModelAdmin[LedgerEntry]):
    """The charges."""

    list_display = ("charged_at", "user", "key", "work_kind", "work_id", "tokens")
    list_select_related = ("budget__user", "hold__key_use")
    list_filter = ("work_kind", "budget__month")
    search_fields = ("work_id", "budget__user__username", "budget__user__email")
    ordering = ("-hold_id",)
    show_full_result_count = False

    @admin.display(description="user")
    def user(self, entry: LedgerEntry) -> str:
        """Who was charged."""
        return str(entry.budget.user)

    @admin.display(description="key")
    def key(self, entry: LedgerEntry) -> str:
        """The start of the key's text, or `app`."""
        return entry.hold.key_use.prefix if entry.hold.key_use else "app"
