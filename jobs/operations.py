"""What an operator looks at, read for `/metrics` and the dashboard: work that waits, engines, requests, money.

Every read goes by an index or a small table, whatever the tables' size.
"""

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
from inference.models import BaseModel, Engine
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
_HOURS: Final[LiteralString] = """
SELECT hour, CASE WHEN status < 400 THEN 'ok' WHEN status < 500 THEN 'refused' ELSE 'failed' END, sum(requests)::bigint
  FROM acsinfra_requestcount WHERE hour >= %(since)s AND route LIKE '/v1%%' GROUP BY 1, 2
"""
_ERRORS: Final[LiteralString] = """
SELECT code, min(status), sum(requests)::bigint FROM acsinfra_requestcount
 WHERE hour >= %(since)s AND code <> '' GROUP BY code ORDER BY 3 DESC
"""
_ROUTES: Final[LiteralString] = """
SELECT method || ' ' || route, sum(requests)::bigint, sum(seconds)::float8 / sum(requests)
  FROM acsinfra_requestcount WHERE hour >= %(since)s AND route LIKE '/v1%%' GROUP BY 1 ORDER BY 2 DESC LIMIT 15
"""


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
class Window:
    """What happened since a moment."""

    since: datetime
    hours: list[tuple[datetime, str, int]]
    errors: list[tuple[str, int, int]]
    routes: list[tuple[str, int, float]]
    tokens: list[tuple[str, int, int]]
    gpu: list[tuple[str, str, float, float]]
    waits: list[tuple[str, str, int, list[float]]]


def unfinished_work() -> list[Work]:
    """Jobs and Harvest jobs that wait or run."""
    return [Work(*row) for row in _rows(_WORK)]


def engines_now() -> list[EngineNow]:
    """Every registered engine and runner."""
    now = timezone.now()
    engines = Engine.objects.select_related("base_model").order_by("base_model__name", "kind", "started_at")
    return [
        EngineNow(
            model=engine.base_model.name,
            kind=engine.kind,
            status=engine.status,
            host=engine.host,
            pid=engine.pid,
            gpus=engine.gpus,
            silence=max(0.0, (now - engine.heartbeat_at).total_seconds()),
        )
        for engine in engines
    ]


def queue_lengths() -> dict[str, int] | None:
    """The messages that wait in each queue, by its name; None while Redis is away."""
    models = BaseModel.objects.filter(is_enabled=True).values_list("name", flat=True)
    queues = ["default", *(queue(model) for model in models for queue in (keys.queue, jobs_queue, runner_queue))]
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
    of_ids = {"since": uuid7_at(since)}
    return Window(
        since=since,
        hours=_rows(_HOURS, since=since),
        errors=_rows(_ERRORS, since=since),
        routes=_rows(_ROUTES, since=since),
        tokens=_rows(_TOKENS, **of_ids),
        gpu=_rows(_GPU, since=since),
        waits=_rows(_WAITS, **of_ids),
    )


def _rows(query: LiteralString, **values: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query, values or None)
        rows: list[Any] = cursor.fetchall()
    return rows
