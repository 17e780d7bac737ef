"""The list of a User's keys with what each used, and the usage of a month."""

import calendar
import re
from collections import defaultdict
from datetime import date, timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from accounts.pages import signed_in
from accounts.selectors import keys_of
from acsinfra.core.plots import SERIES_AT_MOST, Plot, plot_bars
from budgets.models import Budget
from budgets.months import month_end
from budgets.selectors import budget_summary
from budgets.usage import UsageLine, months_of, shares, usage_as_csv, usage_of_month

REST = "others"
REVOKED_SHOWN = 50


@login_required
@never_cache
@require_safe
def keys_page(request: HttpRequest) -> HttpResponse:
    """The User's keys, newest first, each with its tokens of this month."""
    user = signed_in(request)
    summary = budget_summary(user)
    usage = {key.api_key_id: key for key in summary.keys}
    keys: list[dict[str, Any]] = [{"key": key, "usage": usage.get(key.pk)} for key in keys_of(user)]
    shown = {
        "working": [entry for entry in keys if entry["key"].state != "revoked"],
        "revoked": [entry for entry in keys if entry["key"].state == "revoked"][:REVOKED_SHOWN],
        "budget": summary,
    }
    return render(request, "budgets/keys.html", shown)


@login_required
@never_cache
@require_safe
def usage_page(request: HttpRequest) -> HttpResponse:
    """Tokens of a month: used, held and left, by day, model and key."""
    user = signed_in(request)
    months = months_of(user)
    month = _asked_month(request, months)
    lines = usage_of_month(user, month)
    is_now = month == months[0]
    kept = None if is_now else Budget.objects.filter(user=user, month=month).first()
    budget = budget_summary(user) if kept is None else kept
    limit = budget.limit if kept is None else kept.token_limit  # type: ignore[union-attr]
    models = shares(lines, lambda line: line.model)
    names = [share.name for share in models]
    shown = {
        "month": month,
        "months": months,
        "ends": month_end(month),
        "is_now": is_now,
        "limit": limit,
        "used": budget.used,
        "held": budget.held,
        "left": max(0, limit - budget.used - budget.held),
        "used_and_held": budget.used + budget.held,
        "by_model": models,
        "by_key": shares(lines, lambda line: line.key),
        "by_kind": shares(lines, lambda line: line.kind),
        "days": _by_day(lines),
        "plot": _plot(lines, month, names),
        "legend": _series_names(names) if len(names) > 1 else [],
    }
    return render(request, "budgets/usage.html", shown)


@login_required
@never_cache
@require_safe
def usage_csv(request: HttpRequest) -> HttpResponse:
    """The month as a file for a spreadsheet."""
    user = signed_in(request)
    month = _asked_month(request, months_of(user))
    headers = {"Content-Disposition": f'attachment; filename="usage-{month:%Y-%m}.csv"'}
    text = usage_as_csv(usage_of_month(user, month))
    return HttpResponse(text, content_type="text/csv; charset=utf-8", headers=headers)


def _asked_month(request: HttpRequest, months: list[date]) -> date:
    """The month of the query, of those that the User has; the newest without one."""
    text = request.GET.get("month")
    if not text:
        return months[0]
    found = re.fullmatch(r"(\d{4})-(\d{2})", text, re.ASCII)
    named = next((month for month in months if found and f"{month:%Y-%m}" == text), None)
    if named is None:
        raise Http404("no such month")
    return named


def _series_names(models: list[str]) -> list[str]:
    return models if len(models) <= SERIES_AT_MOST else [*models[: SERIES_AT_MOST - 1], REST]


def _plot(lines: list[UsageLine], month: date, models: list[str]) -> Plot:
    n_days = calendar.monthrange(month.year, month.month)[1]
    days = [month + timedelta(days=at) for at in range(n_days)]
    names = _series_names(models)
    values: dict[str, list[float]] = {name: [0.0] * n_days for name in names}
    for line in lines:
        # Charges come no earlier than their month's first day.
        at = max(0, (line.day - month).days)
        values[line.model if line.model in values else REST][at] += line.tokens
    labels = [f"{day.day} {day:%b}" for day in days]
    return plot_bars(labels, list(values.items()), label_every=4)


def _by_day(lines: list[UsageLine]) -> list[tuple[date, int]]:
    sums: defaultdict[date, int] = defaultdict(int)
    for line in lines:
        sums[line.day] += line.tokens
    return sorted(sums.items(), reverse=True)
