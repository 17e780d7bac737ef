"""How many requests are answered, how, and in what time: for `/metrics` and the operators' dashboard.

Each API process counts in its memory, which costs a request a microsecond and no round trip, and adds what it counted
to rows of the hour every FLUSH_SECONDS, in one statement beside its requests. So the counts are of all API processes on
all hosts, wherever they are read; a process that is killed loses its last seconds of them.
"""

import asyncio
import functools
import json
import re
from bisect import bisect_left
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString, NamedTuple

import psycopg
import structlog
from django.db import connection as orm_connection
from django.http import HttpRequest

from acsinfra.core import db
from acsinfra.core.paths import is_api_path

logger = structlog.get_logger(__name__)

FLUSH_SECONDS: Final = 5.0
# Upper bounds of the histogram, in seconds; the last bucket, without one, is for what took longer.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# What lies below each of these counts as one route.
PAGES: Final = frozenset({"admin", "app", "docs", "files", "static"})
HOURS_KEPT: Final = timedelta(days=32)
# Where older hours are added up, so that the sums over all rows only ever grow.
LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

# Sorted, so that two processes lock the hour's rows in the same order.
_ADD: Final[LiteralString] = """
INSERT INTO acsinfra_requestcount AS total (hour, route, method, status, code, bucket, requests, seconds)
SELECT hour, route, method, status, code, bucket, requests, seconds
  FROM jsonb_to_recordset(%(rows)s::jsonb) AS counted(hour timestamptz, route text, method text, status smallint,
                                                      code text, bucket smallint, requests bigint, seconds float8)
 ORDER BY hour, route, method, status, code, bucket
    ON CONFLICT (hour, route, method, status, code, bucket) DO UPDATE
   SET requests = total.requests + excluded.requests, seconds = total.seconds + excluded.seconds
"""
_FOLD: Final[LiteralString] = """
WITH old AS (
    DELETE FROM acsinfra_requestcount WHERE hour < %(before)s AND hour > %(long_ago)s
    RETURNING route, method, status, code, bucket, requests, seconds
), added AS (
    INSERT INTO acsinfra_requestcount AS total (hour, route, method, status, code, bucket, requests, seconds)
    SELECT %(long_ago)s, route, method, status, code, bucket, sum(requests), sum(seconds)
      FROM old GROUP BY route, method, status, code, bucket
        ON CONFLICT (hour, route, method, status, code, bucket) DO UPDATE
       SET requests = total.requests + excluded.requests, seconds = total.seconds + excluded.seconds
)
SELECT count(*) FROM old
"""


class _Kind(NamedTuple):
    """The requests that are counted together. `route` is a pattern of the URLs, so that there are few."""

    hour: datetime
    route: str
    method: str
    status: int
    code: str
    bucket: int


# How many, and the sum of their times in seconds.
_counted: dict[_Kind, tuple[int, float]] = {}


def count_request(request: HttpRequest, *, status: int, code: str, seconds: float) -> None:
    """Count an answered request; `code` is its error's, empty for none."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    bucket = bisect_left(BUCKETS, seconds)
    _add(_Kind(hour, route_of(request), _method_of(request), status, code, bucket), 1, seconds)


def _add(kind: _Kind, requests: int, seconds: float) -> None:
    counted, summed = _counted.get(kind, (0, 0.0))
    _counted[kind] = counted + requests, summed + seconds


def route_of(request: HttpRequest) -> str:
    """The request's route as the reference writes it, such as `/v1/harvest/{job_id}`; pages count together."""
    # By the path, because static files and requests that broke off early meet no route.
    first = request.path_info.lstrip("/").partition("/")[0]
    if first in PAGES:
        return f"/{first}"
    match = getattr(request, "resolver_match", None)
    if match is None or match.route.startswith("^"):
        return "unknown, below /v1" if is_api_path(request.path_info) else "unknown"
    return _readable(match.route)


@functools.cache
def _readable(pattern: str) -> str:
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", pattern)


def _method_of(request: HttpRequest) -> str:
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return request.method if request.method in known else "other"


@asynccontextmanager
async def counting() -> AsyncGenerator[None]:
    """While an API process serves: add its counts to the database every few seconds, and once more at its end."""
    flushing = asyncio.create_task(_flush_for_ever(), name="traffic")
    try:
        yield
    finally:
        flushing.cancel()
        with suppress(asyncio.CancelledError):
            await flushing
        await flush()


async def _flush_for_ever() -> None:
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        try:
            await flush()
        except Exception:
            # Counting must go on, and end no API process, whatever this was.
            logger.exception("requests were not counted")


async def flush() -> None:
    """Add what this process has counted to the database; kept for the next time while it is away."""
    if not _counted:
        return
    counted = dict(_counted)
    _counted.clear()
    try:
        async with db.connection() as taken:
            await taken.execute(_ADD, {"rows": _as_json(counted)})
    except psycopg.Error as error:
        logger.warning("requests are counted once the database is back", error_type=type(error).__name__)
        for kind, (requests, seconds) in counted.items():
            _add(kind, requests, seconds)


def _as_json(counted: dict[_Kind, tuple[int, float]]) -> str:
    return json.dumps(
        [
            {**kind._asdict(), "hour": kind.hour.isoformat(), "requests": requests, "seconds": seconds}
            for kind, (requests, seconds) in counted.items()
        ]
    )


def fold_old_counts(*, now: datetime | None = None) -> int:
    """Add hours older than HOURS_KEPT up, in one row for each kind; returns how many rows went into them."""
    before = (now or datetime.now(UTC)) - HOURS_KEPT
    with orm_connection.cursor() as cursor:
        cursor.execute(_FOLD, {"before": before, "long_ago": LONG_AGO})
        folded: int = cursor.fetchone()[0]
    return folded
