"""`GET /metrics`: Prometheus' view of the whole installation, the same from any API process.

Counters are sums over rows that all processes write; so a scrape may go to any of them, and a restart resets nothing.
"""

import ipaddress
import secrets
from collections.abc import Iterator
from typing import Any, Final

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from acsinfra.core import traffic
from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError, ErrorCode, api_error_of
from acsinfra.core.middleware import as_response
from budgets.spend import read_spending
from jobs.operations import EngineNow, models_now, queue_lengths, unfinished_work

_FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-Ip")


@require_safe
async def metrics(request: HttpRequest) -> HttpResponse:
    """The metrics, for a scraper on this host or one that brings `METRICS_TOKEN` as its bearer token."""
    if not may_scrape(request):
        message = "Metrics are for this host alone, or for the bearer token that METRICS_TOKEN names."
        return as_response(ApiError(ErrorCode.INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"}))
    # What this process has counted is in its own answer.
    await traffic.flush()
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    try:
        body = await database_step(lambda: encode(_registry()))
    except Exception as error:  # noqa: BLE001 (each becomes an answer, as in the API)
        return as_response(api_error_of(error))
    return HttpResponse(body, content_type=content_type)


def may_scrape(request: HttpRequest) -> bool:
    """Whether the request comes from this host itself and through no proxy, or brings the token."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    token = settings.METRICS_TOKEN
    if token and scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode()):
        return True
    # A proxy on this host makes every request look like one of its own.
    is_forwarded = settings.BEHIND_TLS_PROXY or any(name in request.headers for name in _FORWARDED)
    return not is_forwarded and _is_loopback(request.META.get("REMOTE_ADDR", ""))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    return registry


class _Collector:
    """Reads the rows at each scrape."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from _requests()
        models, engines = models_now()
        yield from _work(models)
        yield from _engines(engines)
        yield from _money()


def _requests() -> Iterator[Metric]:
    total = CounterMetricFamily("acs_requests", "Answered requests.", labels=["route", "method", "status", "code"])
    seconds = HistogramMetricFamily(
        "acs_request_seconds", "Time until the end of the answer.", labels=["route", "method"]
    )
    sums: dict[tuple[str, str, str, str], int] = {}
    times: dict[tuple[str, str], tuple[list[int], float]] = {}
    for route, method, status, code, bucket, requests, spent in _rows(
        "SELECT route, method, status, code, bucket, sum(requests)::bigint, sum(seconds)::float8"
        " FROM acsinfra_requestcount GROUP BY 1, 2, 3, 4, 5"
    ):
        kind = (route, method, str(status), code)
        sums[kind] = sums.get(kind, 0) + requests
        counts, summed = times.get((route, method), ([0] * (len(traffic.BUCKETS) + 1), 0.0))
        counts[bucket] += requests
        times[route, method] = counts, summed + spent
    for kind, requests in sums.items():
        total.add_metric(list(kind), requests)
    for labels, (counts, summed) in times.items():
        up_to = [sum(counts[: at + 1]) for at in range(len(counts))]
        bounds = [*(str(bound) for bound in traffic.BUCKETS), "+Inf"]
        seconds.add_metric(list(labels), buckets=list(zip(bounds, up_to, strict=True)), sum_value=summed)
    yield total
    yield seconds


def _work(models: list[str]) -> Iterator[Metric]:
    labels = ["kind", "model", "status"]
    count = GaugeMetricFamily("acs_unfinished_jobs", "Jobs and Harvest jobs that wait or run.", labels=labels)
    oldest = GaugeMetricFamily("acs_oldest_job_seconds", "Age of the oldest of them.", labels=labels)
    for work in unfinished_work():
        count.add_metric([work.kind, work.model, work.status], work.count)
        oldest.add_metric([work.kind, work.model, work.status], work.oldest)
    yield count
    yield oldest
    lengths = queue_lengths(models)
    yield GaugeMetricFamily("acs_broker_up", "Whether Redis answers.", value=float(lengths is not None))
    messages = GaugeMetricFamily("acs_queue_messages", "Messages that wait in a queue.", labels=["queue"])
    for queue, length in (lengths or {}).items():
        messages.add_metric([queue], length)
    yield messages


def _engines(registered: list[EngineNow]) -> Iterator[Metric]:
    engines = GaugeMetricFamily("acs_engines", "Engines and runners.", labels=["model", "kind", "state"])
    silence = GaugeMetricFamily(
        "acs_engine_heartbeat_age_seconds", "Since an engine's last heartbeat.", labels=["model", "kind", "host", "pid"]
    )
    counts: dict[tuple[str, str, str], int] = {}
    for engine in registered:
        kind = (engine.model, engine.kind, engine.state)
        counts[kind] = counts.get(kind, 0) + 1
        silence.add_metric([engine.model, engine.kind, engine.host, str(engine.pid)], engine.silence)
    for kind, count in counts.items():
        engines.add_metric(list(kind), count)
    yield engines
    yield silence
    gpu = CounterMetricFamily("acs_gpu_seconds", "Seconds that engines were up, times GPUs.", labels=["model", "kind"])
    for model, name, spent in _rows(
        "SELECT model, kind, sum(extract(epoch FROM until - since) * gpus)::float8 FROM budgets_gputime GROUP BY 1, 2"
    ):
        gpu.add_metric([model, name], spent)
    yield gpu


def _money() -> Iterator[Metric]:
    [(used, held)] = _rows("SELECT coalesce(sum(used), 0)::bigint, coalesce(sum(held), 0)::bigint FROM budgets_budget")
    yield CounterMetricFamily("acs_tokens_charged", "Tokens charged.", value=used)
    yield GaugeMetricFamily("acs_tokens_held", "Tokens held.", value=held)
    spending = read_spending()
    spent = GaugeMetricFamily(
        "acs_spent_usd", "Cost of GPU time in the present day and month (UTC).", labels=["period"]
    )
    spent.add_metric(["day"], float(spending.usd_today))
    spent.add_metric(["month"], float(spending.usd_this_month))
    yield spent
    refused = spending.refusal() is not None
    yield GaugeMetricFamily("acs_new_work_refused", "Whether a pause or a Spend limit holds.", value=float(refused))


def _rows(query: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query)
        rows: list[Any] = cursor.fetchall()
    return rows
