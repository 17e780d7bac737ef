"""The Spend limit: GPU time as it is recorded, what it costs, and whether new GPU work may start.

Engines record their time with each heartbeat, so that kill -9 loses no more than one. Whoever starts work asks
`require_spending_async`, or `may_start_work` where the work waits instead: the answer is at most a second old and costs
a request no query of its own. What runs goes on, whatever the answer.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, LiteralString

from django.db import connection

from acsinfra.core.db import fetch_one
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.times import iso_utc_ms
from budgets.months import month_end, month_of

CHECK_SECONDS: Final = 1.0

# From the last moment that was recorded (or now, at first) to now, cut at midnights. Each row says from when to when,
# so that it does no harm to record twice, or twice at once.
_RECORD: Final[LiteralString] = """
INSERT INTO budgets_gputime (engine_id, day, model, kind, gpus, usd_per_gpu_hour, since, until)
SELECT %(engine)s::uuid, d::date, %(model)s, %(kind)s, %(gpus)s, %(price)s::numeric,
       greatest(last.recorded, d AT TIME ZONE 'UTC'), least(%(now)s, (d + interval '1 day') AT TIME ZONE 'UTC')
  FROM (SELECT least(coalesce(max(until), %(now)s), %(now)s) AS recorded
          FROM budgets_gputime WHERE engine_id = %(engine)s::uuid) last,
       generate_series(date_trunc('day', last.recorded AT TIME ZONE 'UTC'), %(now)s AT TIME ZONE 'UTC',
                       interval '1 day') d
    ON CONFLICT (day, engine_id) DO UPDATE
   SET until = greatest(budgets_gputime.until, excluded.until), usd_per_gpu_hour = excluded.usd_per_gpu_hour
"""
_READ: Final[LiteralString] = """
SELECT %(now)s, l.usd_per_day, l.usd_per_month, l.is_paused, l.pause_ends_at, coalesce(t.day, 0), coalesce(t.month, 0)
  FROM (SELECT (%(now)s AT TIME ZONE 'UTC')::date AS today) AS moment
  LEFT JOIN budgets_spendlimit l ON l.id = 1
 CROSS JOIN LATERAL (
     SELECT sum(usd) FILTER (WHERE day = today) AS day, sum(usd) AS month
       FROM (SELECT day, extract(epoch FROM until - since) * gpus * usd_per_gpu_hour / 3600 AS usd
               FROM budgets_gputime WHERE day >= date_trunc('month', today::timestamp)::date AND day <= today) spent
 ) t
"""


@dataclass(frozen=True)
class Spending:
    """What GPU time costs so far, in USD, against the limits and the pause, as of `now`."""

    now: datetime
    usd_per_day: Decimal | None
    usd_per_month: Decimal | None
    is_paused: bool
    pause_ends_at: datetime | None
    usd_today: Decimal
    usd_this_month: Decimal

    def refusal(self) -> ApiError | None:
        """`429 spend_cap` where new GPU work may not start; None where it may.

        It has `Retry-After` where it ends by itself: the pause at its time, a day's or month's limit with the period.
        """
        reasons: list[str] = []
        ends: list[datetime | None] = []
        if self.is_paused and (self.pause_ends_at is None or self.pause_ends_at > self.now):
            reasons.append("an operator has paused new GPU work")
            ends.append(self.pause_ends_at)
        if self.usd_per_day is not None and self.usd_today >= self.usd_per_day:
            reasons.append("the Spend limit of this day is reached")
            midnight = self.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            ends.append(midnight + timedelta(days=1))
        if self.usd_per_month is not None and self.usd_this_month >= self.usd_per_month:
            reasons.append("the Spend limit of this month is reached")
            ends.append(month_end(month_of(self.now)))
        if not reasons:
            return None
        words = " and ".join(reasons)
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            message, headers = f"{words}.", {"x-should-retry": "false"}
        else:
            end = max(known)
            seconds = max(1, math.ceil((end - self.now).total_seconds()))
            message, headers = f"{words}, until {iso_utc_ms(end)}.", {"Retry-After": str(seconds)}
        return ApiError(ErrorCode.SPEND_CAP, f"{message[0].upper()}{message[1:]} Reading goes on.", headers=headers)


def record_gpu_time(
    *,
    engine_id: uuid.UUID,
    model: str,
    kind: str,
    gpus: int,
    usd_per_gpu_hour: Decimal,
    now: datetime | None = None,
) -> None:
    """Count the engine as up since it was last recorded, or from now on where it never was. Twice does no harm."""
    values = {
        "engine": engine_id,
        "model": model,
        "kind": kind,
        "gpus": gpus,
        "price": usd_per_gpu_hour,
    }
    with connection.cursor() as cursor:
        cursor.execute(*_at(_RECORD, now, values))


def read_spending(*, now: datetime | None = None) -> Spending:
    """What the database says right now."""
    with connection.cursor() as cursor:
        cursor.execute(*_at(_READ, now))
        return _spending(cursor.fetchone())


async def require_spending_async() -> None:
    """Raise `429 spend_cap` where new GPU work may not start, as of at most a second ago.

    Requests that come while it is read wait for one read together.
    """
    refusal = (await _latest.get_async()).refusal()
    if refusal is not None:
        raise refusal


def may_start_work() -> bool:
    """Whether waiting work may be claimed, as of at most a second ago: under the limit or a pause it waits."""
    return _latest.get().refusal() is None


def forget_spending() -> None:
    """Have the next question read the database: for whoever has just changed a limit in this process."""
    _latest.forget()


class _Latest:
    """This process's last look at the spending."""

    def __init__(self) -> None:
        self._value: Spending | None = None
        self._fresh_until = 0.0
        self._read: asyncio.Task[Spending] | None = None

    def get(self) -> Spending:
        value = self._fresh()
        if value is None:
            began = time.monotonic()
            value = self._keep(read_spending(), began)
        return value

    async def get_async(self) -> Spending:
        value = self._fresh()
        if value is not None:
            return value
        if self._read is None or self._read.done() or self._read.get_loop() is not asyncio.get_running_loop():
            self._read = asyncio.create_task(self._refresh(), name="spending")
        # A caller that goes away must not take the read from the others.
        return await asyncio.shield(self._read)

    def forget(self) -> None:
        self._fresh_until = 0.0

    def _fresh(self) -> Spending | None:
        return self._value if time.monotonic() < self._fresh_until else None

    async def _refresh(self) -> Spending:
        began = time.monotonic()
        return self._keep(_spending(await fetch_one(*_at(_READ, None))), began)

    def _keep(self, value: Spending, began: float) -> Spending:
        self._value, self._fresh_until = value, began + CHECK_SECONDS
        return value


_latest = _Latest()


def _at(
    query: LiteralString, now: datetime | None, values: Mapping[str, Any] | None = None
) -> tuple[LiteralString, dict[str, Any]]:
    """The statement at `now`, or at the database's own clock: those of hosts may differ."""
    if now is None:
        return query.replace("%(now)s", "now()"), dict(values or {})
    return query.replace("%(now)s", "%(now)s::timestamptz"), {**(values or {}), "now": now}


def _spending(row: tuple[Any, ...] | None) -> Spending:
    assert row is not None
    now, usd_per_day, usd_per_month, is_paused, pause_ends_at, usd_today, usd_this_month = row
    return Spending(
        now=now,
        usd_per_day=usd_per_day,
        usd_per_month=usd_per_month,
        is_paused=bool(is_paused),
        pause_ends_at=pause_ends_at,
        usd_today=usd_today,
        usd_this_month=usd_this_month,
    )
