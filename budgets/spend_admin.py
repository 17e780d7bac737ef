"""The Spend limit and the recorded GPU time in the admin."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import reverse

from acsinfra.core.admin import PlatformAdmin, ReadOnly
from acsinfra.core.admin_columns import id_column
from budgets.models import GpuTime, SpendLimit
from budgets.spend import forget_spending, read_spending


@admin.register(SpendLimit)
class SpendLimitAdmin(PlatformAdmin[SpendLimit]):
    """The limits, the pause by hand, and what was spent. API processes and workers follow within a second."""

    list_display = ("__str__", "usd_per_day", "usd_per_month", "is_paused", "pause_ends_at")
    fields = (("usd_per_day", "spent_today"), ("usd_per_month", "spent_this_month"), ("is_paused", "pause_ends_at"))
    readonly_fields = ("spent_today", "spent_this_month")

    @admin.display(description="spent today (UTC)")
    def spent_today(self, limit: SpendLimit | None) -> str:
        """USD since midnight UTC."""
        return f"{read_spending().usd_today:,.2f} USD"

    @admin.display(description="spent this month (UTC)")
    def spent_this_month(self, limit: SpendLimit | None) -> str:
        """USD since the month began, UTC."""
        return f"{read_spending().usd_this_month:,.2f} USD"

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponseBase:  # type: ignore[override]
        """The page of the one row there is, or can be."""
        if request.method != "GET" or not self.has_view_or_change_permission(request):
            return super().changelist_view(request, extra_context)
        if SpendLimit.objects.exists():
            return HttpResponseRedirect(reverse("admin:budgets_spendlimit_change", args=[SpendLimit.ONLY]))
        return HttpResponseRedirect(reverse("admin:budgets_spendlimit_add"))

    def save_model(self, request: HttpRequest, obj: SpendLimit, form: Any, change: bool) -> None:
        """Save; this process follows at once."""
        super().save_model(request, obj, form, change)
        forget_spending()

    def has_add_permission(self, request: HttpRequest) -> bool:
        """While there is none: there is one for the whole installation."""
        return super().has_add_permission(request) and not SpendLimit.objects.exists()

    def has_delete_permission(self, request: HttpRequest, obj: SpendLimit | None = None) -> bool:
        """Never: an empty limit is none."""
        return False


@admin.register(GpuTime)
class GpuTimeAdmin(ReadOnly, PlatformAdmin[GpuTime]):
    """How long each engine was up on each day; engines write these rows themselves."""

    list_display = ("day", "model", "kind", id_column("engine_id"), "gpus", "usd_per_gpu_hour", "since", "until", "usd")
    list_filter = ("model", "kind")
    ordering = ("-day", "model")

    @admin.display(description="USD")
    def usd(self, time: GpuTime) -> str:
        """What it costs."""
        return f"{time.gpu_seconds / 3600 * float(time.usd_per_gpu_hour):,.4f}"
