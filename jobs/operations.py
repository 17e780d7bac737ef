"""What an operator looks at, read for `/metrics` and the dashboard: work that waits, engines, requests, money.

Every read goes by an index or a small table, whatever the tables' size.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

from django.conf import settings
from django.db import connection
from django.utils import timezone
from redis import Redis
from redis.exceptions import RedisError

from acsinfra.core.admin import uuid7_at
from harvest.services import runner_queue
from inference.bus import keys
from jobs.services import jobs_queue

REDIS_SECONDS: Final = 1.0

# The partial indexes of unfinished work answer these.
_WORK: Final[LiteralString] = """
SELECT 'job', m.name, j.status, count(*), extract(epoch FROM now() - min(j.created_at))::float8
  FROM jobs_completionjob j JOIN inference_basemodel m ON m.id = j.base_model_id
 WHERE j.status IN ('queued', 'running') GROUP BY m.name, j.status
UNION ALL
SELECT 'harvest', m.name, j.status, count(*), extract(epoch FROM now() - min(j.created_at))::float8
  FROM harvest_harvestjob j JOIN inference_basemodel m ON m.id = j.base_model_id
 WHERE j.status IN ('pending', 'running') GROUP BY m.name, j.status
 ORDER BY 1, 2, 3
"""
_MODELS: Final[LiteralString] = """
SELECT m.name, m.is_enabled, e.kind, e.status, e.host, e.pid, e.gpus,
       greatest(0, extract(epoch FROM now() - e.heartbeat_at))::float8
  FROM inference_basemodel m LEFT JOIN inference_engine e ON e.base_model_id = m.id
 ORDER BY m.name, e.kind, e.started_at
"""
# How long work waited for its first start. Ids carry their time, so that the primary key gives a span of time.
_WAITS: Final[LiteralString] = """
SELECT 'job', model, count(*), percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY extract(epoch FROM started_at - created_at))::float8[]
  FROM jobs_completionjob WHERE id >= %(since)s AND started_at IS NOT NULL GROUP BY model
UNION ALL
SELECT 'harvest', model, count(*), percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY extract(epoch FROM started_at - created_at))::float8[]
  FROM harvest_harvestjob WHERE id >= %(since)s AND started_at IS NOT NULL GROUP BY model
 ORDER BY 1, 2
"""
_TOKENS: Final[LiteralString] = """
SELECT work_kind, count(*), sum(tokens)::bigint FROM budgets_ledgerentry WHERE hold_id >= %(since)s
 GROUP BY work_kind ORDER BY 3 DESC
"""
_GPU: Final[LiteralString] = """
SELECT model, kind, sum(seconds)::float8, sum(seconds * usd_per_gpu_hour / 3600)::float8
  FROM (SELECT model, kind, usd_per_gpu_hour, gpus * greatest(0, extract(epoch FROM until - greatest(since, %(since)s)))
               AS seconds
          FROM budgets_gputime WHERE day >= %(since)s::date AND until > %(since)s) up
 GROUP BY model, kind ORDER BY 3 DESC
"""
_REQUESTS: Final[LiteralString] = """
SELECT hour, method, route, status, code, sum(requests)::bigint, sum(seconds)::float8
  FROM acsinfra_requestcount WHERE hour >= %(since)s AND route LIKE '/v1%%' GROUP BY 1, 2, 3, 4, 5
"""
ROUTES_SHOWN: Final = 15


@dataclass(frozen=True)
class Work:
    """Unfinished work of one kind, model and status; `oldest` is its age in seconds."""

    kind: str
    model: str
    status: str
    count: int
    oldest: float


@dataclass(frozen=True)
class EngineNow:
    """An engine or runner as its row says; `silence` is the age of its heartbeat, in seconds."""

    model: str
    kind: str
    status: str
    host: str
    pid: int
    gpus: int
    silence: float

    @property
    def state(self) -> str:
        """`starting`, `live`, or `silent` once it counts as gone."""
        return "silent" if self.silence > settings.ENGINE_SILENT_AFTER.total_seconds() else self.status


@dataclass(frozen=True)
class Requests:
    """The API's answered requests since a moment.

    `hours` counts by hour and outcome (`ok`, `refused`, `failed`), `errors` by code and status, `routes` has how many
    and their mean time in seconds; the last two have the most first.
    """

    hours: dict[datetime, Counter[str]]
    errors: list[tuple[tuple[str, int], int]]
    routes: list[tuple[str, int, float]]


@dataclass(frozen=True)
class Window:
    """What happened since a moment.

    `tokens` has kind of work, charges and tokens; `gpu` model, kind of engine, seconds and USD; `waits` kind of work,
    model, how many started, and the median and 95th percentile of their waits in seconds.
    """

    since: datetime
    requests: Requests
    tokens: list[tuple[str, int, int]]
    gpu: list[tuple[str, str, float, float]]
    waits: list[tuple[str, str, int, list[float]]]


def unfinished_work() -> list[Work]:
    """Jobs and Harvest jobs that wait or run."""
    return [Work(*row) for row in _rows(_WORK)]


def models_now() -> tuple[list[str], list[EngineNow]]:
    """The names of the enabled Base models, and every registered engine and runner; by the database's clock."""
    rows = _rows(_MODELS)
    names = [name for name, is_enabled, *_ in rows if is_enabled]
    engines = [EngineNow(name, *engine) for name, _, *engine in rows if engine[0] is not None]
    return list(dict.fromkeys(names)), engines


def queue_lengths(models: Iterable[str]) -> dict[str, int] | None:
    """The messages that wait in each queue of these models; None while Redis is away."""
    queues = [queue(model) for model in models for queue in (keys.queue, jobs_queue, runner_queue)]
    try:
        with Redis.from_url(
            settings.BROKER_URL, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS
        ) as redis:
            lengths = redis.pipeline(transaction=False)
            for queue in queues:
                lengths.llen(queue)
            return dict(zip(queues, lengths.execute(), strict=True))
    except RedisError:
        return None


def look_back(past: timedelta) -> Window:
    """What happened in the `past`, to the hour."""
    since = (timezone.now() - past).replace(minute=0, second=0, microsecond=0)
    return Window(
        since=since,
        requests=_requests(since),
        tokens=_rows(_TOKENS, since=uuid7_at(since)),
        gpu=_rows(_GPU, since=since),
        waits=_rows(_WAITS, since=uuid7_at(since)),
    )


def _requests(since: datetime) -> Requests:
    hours: dict[datetime, Counter[str]] = {}
    errors: Counter[tuple[str, int]] = Counter()
    routes: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for hour, method, route, status, code, requests, seconds in _rows(_REQUESTS, since=since):
        outcome = "failed" if status >= 500 else "refused" if status >= 400 else "ok"
        hours.setdefault(hour, Counter())[outcome] += requests
        routes[f"{method} {route}"] += requests
        times[f"{method} {route}"] += seconds
        if code:
            errors[code, status] += requests
    shown = [(name, requests, times[name] / requests) for name, requests in routes.most_common(ROUTES_SHOWN)]
    return Requests(hours=hours, errors=errors.most_common(), routes=shown)


def _rows(query: LiteralString, **values: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query, values or None)
        rows: list[Any] = cursor.fetchall()
    return rows
