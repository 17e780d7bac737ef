"""The operators' dashboard in the admin: what runs and waits now, and what happened in a day or a week."""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.contrib import admin
from django.http import HttpRequest
from django.http.response import HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from budgets.spend import read_spending
from jobs.operations import Window, look_back, models_now, queue_lengths, unfinished_work

WINDOWS: Final = {"day": ("Past 24 hours", timedelta(days=1)), "week": ("Past 7 days", timedelta(days=7))}
WIDTH, HEIGHT = 720, 140
OUTCOMES: Final = ("ok", "refused", "failed")


@dataclass(frozen=True)
class Bar:
    """The requests of one hour, as a part of a bar: SVG's measures, and what a pointer is told."""

    outcome: str
    x: float
    y: float
    width: float
    height: float
    title: str


def dashboard(request: HttpRequest) -> HttpResponse:
    """The page; htmx asks for the part of it that lives."""
    if request.headers.get("HX-Request") == "true":
        return TemplateResponse(request, "admin/dashboard_now.html", _now())
    chosen = request.GET.get("past")
    name = chosen if chosen in WINDOWS else "day"
    window = look_back(WINDOWS[name][1])
    bars, most = _bars(window)
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": "Dashboard",
        "windows": [(key, words, key == name) for key, (words, _) in WINDOWS.items()],
        "window": window,
        "bars": bars,
        "most": most,
        "width": WIDTH,
        "height": HEIGHT,
        "totals": sum(window.requests.hours.values(), Counter()),
        "gpu": [(model, kind, seconds / 3600, usd) for model, kind, seconds, usd in window.gpu],
        "routes": [(route, n, mean * 1000) for route, n, mean in window.requests.routes],
        "waits": [(kind, model, n, *percentiles) for kind, model, n, percentiles in window.waits],
        **_now(),
    }
    return TemplateResponse(request, "admin/dashboard.html", context)


def _now() -> dict[str, Any]:
    spending = read_spending()
    models, engines = models_now()
    return {
        "now": timezone.now(),
        "engines": engines,
        "work": unfinished_work(),
        "queues": queue_lengths(models),
        "spending": spending,
        "refusal": spending.refusal(),
    }


def _bars(window: Window) -> tuple[list[Bar], int]:
    """The hours as stacked bars, and the most requests of one hour."""
    counts = window.requests.hours
    most = max((of_hour.total() for of_hour in counts.values()), default=0)
    n_hours = int((timezone.now() - window.since) / timedelta(hours=1)) + 1
    step = WIDTH / n_hours
    bars: list[Bar] = []
    for hour, of_hour in sorted(counts.items()):
        x, top = (hour - window.since) / timedelta(hours=1) * step, float(HEIGHT)
        for outcome in OUTCOMES:
            requests = of_hour[outcome]
            if requests:
                height = max(1.0, requests / most * HEIGHT)
                top -= height
                title = f"{hour:%Y-%m-%d %H}:00 UTC: {requests:,} {outcome}"
                bars.append(
                    Bar(outcome, round(x, 2), round(top, 2), round(max(1.0, step - 1), 2), round(height, 2), title)
                )
    return bars, most
