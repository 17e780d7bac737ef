"""The money in the admin: a User's limit is set on the User's page, all else is read."""

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest

from acsinfra.core.admin import MadeFilter, PlatformAdmin, ReadOnly, SearchedByIdAndUser
from acsinfra.core.admin_columns import id_column, number_column, number_columns
from budgets import people_admin, spend_admin  # noqa: F401 (each registers its own)
from budgets.models import Budget, Hold, KeyUse, LedgerEntry, WorkKind


class KeyUseInline(ReadOnly, admin.TabularInline[KeyUse, Budget]):
    """What each key used of a Budget."""

    model = KeyUse
    readonly_fields = number_columns("cap", "used", "held")
    fields = ("api_key", "prefix", *readonly_fields)
    extra = 0


@admin.register(Budget)
class BudgetAdmin(ReadOnly, PlatformAdmin[Budget]):
    """The Budgets of each month."""

    list_display = ("user", "month", *map(number_column, ("token_limit", "used", "held")))
    list_select_related = ("user",)
    list_filter = ("month",)
    search_fields = ("user__username", "user__email")
    search_help_text = "A User's name or address."
    ordering = ("-id",)
    readonly_fields = number_columns("token_limit", "ceiling", "used", "held")
    fields = ("user", "month", *readonly_fields)
    inlines = (KeyUseInline,)


class _SearchedByWork[M: Model](SearchedByIdAndUser[M]):
    """Holds and charges by the id of their work, too."""

    search_help_text = "The id of the work (a request's or a Job's) or of the Hold; a User's name or address."

    def ids_like(self, queryset: QuerySet[Any], term: str) -> list[Any]:
        """The Hold of the work `term`, whose kinds are named because the index begins with them; else by its own id."""
        of_work = Hold.objects.filter(~Q(state=Hold.State.RELEASED), work_kind__in=WorkKind.values, work_id=term[:100])
        return list(of_work.values_list("pk", flat=True)) or super().ids_like(queryset, term)

    def of_users(self, users: Sequence[int]) -> Q:
        """Through their Budgets, a few for each."""
        return Q(budget__in=list(Budget.objects.filter(user__in=users).values_list("pk", flat=True)))


@admin.register(Hold)
class HoldAdmin(ReadOnly, _SearchedByWork[Hold]):
    """The Holds, live and ended."""

    list_display = (
        "taken_at",
        "user",
        "key",
        "work_kind",
        id_column("work_id", "work"),
        number_column("tokens"),
        "state",
        number_column("charged"),
        "ended_at",
    )
    list_select_related = ("budget__user", "key_use")
    list_filter = (MadeFilter, "state")
    ordering = ("-id",)
    readonly_fields = ("user", "key", *number_columns("tokens", "charged"))
    fields = (
        "id",
        "user",
        "key",
        "budget",
        readonly_fields[2],
        "state",
        readonly_fields[3],
        "work_kind",
        "work_id",
        "model",
        "holder",
        "taken_at",
        "expires_at",
        "ended_at",
    )

    @admin.display(description="user")
    def user(self, hold: Hold) -> str:
        """Whose Budget it is in."""
        return str(hold.budget.user)

    @admin.display(description="key")
    def key(self, hold: Hold) -> str:
        """The start of the key's text, or `app`."""
        return hold.key_use.prefix if hold.key_use else "app"


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnly, _SearchedByWork[LedgerEntry]):
    """The charges."""

    list_display = ("charged_at", "user", "key", "work_kind", id_column("work_id", "work"), number_column("tokens"))
    list_select_related = ("budget__user",)
    list_filter = (MadeFilter,)
    ordering = ("-hold_id",)
    readonly_fields = ("user", "key", *number_columns("tokens"))
    fields = ("user", "key", "hold", "budget", readonly_fields[2], "work_kind", "work_id", "model", "charged_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[LedgerEntry]:
        """With the Holds of a page in a query of their own: joined, they are all read down to the page's."""
        return super().get_queryset(request).prefetch_related("hold__key_use")

    @admin.display(description="user")
    def user(self, entry: LedgerEntry) -> str:
        """Who was charged."""
        return str(entry.budget.user)

    @admin.display(description="key")
    def key(self, entry: LedgerEntry) -> str:
        """The start of the key's text, or `app`."""
        return entry.hold.key_use.prefix if entry.hold.key_use else "app"
