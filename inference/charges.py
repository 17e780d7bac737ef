"""The money of Completions: each has a Hold from its arrival to its end, and is charged what its engine counted.

The API process that answers takes the Hold and ends it, off its client's way. If that process dies, a sweep ends it by
the count that the worker left in Redis, once the worker must have noticed too.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
import structlog
from django.conf import settings
from django.utils import timezone
from redis import Redis

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import InProgress, RecordedAnswer, SweptKeys, end_abandoned_keys
from acsinfra.core.renderers import render_json
from budgets.models import Hold, WorkKind
from budgets.services import (
    SweepCount,
    WorkRef,
    end_expired_holds,
    end_orphaned_holds,
    release_hold_async,
    settle_hold_async,
    take_hold_async,
)
from inference.bus import keys
from inference.bus.api import Bus, Count, read_count
from inference.wire import CompletionWork

logger = structlog.get_logger(__name__)

KINDS: Final = (WorkKind.COMPLETION, WorkKind.APP)
# The last resort, for a Hold that its living API process could not end: long after every retry.
EXPIRES_AFTER = timedelta(hours=1)
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
# While it stops, an API process tries this often to end a Hold before it leaves it to the sweep.
TRIES_WHILE_CLOSING = 4
# An API process whose key is gone may be on its way back (Redis came back empty), and its workers take a while to
# notice that it died, stop what it asked for, and leave their last counts.
MISSING_FOR = timedelta(seconds=10)


@dataclass(frozen=True)
class Payer:
    """Whose Budget pays for a Completion, and under which key; None for work from the App."""

    user: User
    api_key: ApiKey | None

    @property
    def line(self) -> str:
        """The name of the line in which the payer's requests wait for their places."""
        return f"key-{self.api_key.pk}" if self.api_key is not None else f"user-{self.user.pk}"


async def hold_for(work: CompletionWork, *, payer: Payer, holder: str) -> Hold:
    """Set `work.hold_tokens` aside. Raises BudgetExceeded (`429 budget_exceeded`)."""
    kind = WorkKind.COMPLETION if payer.api_key is not None else WorkKind.APP
    return await take_hold_async(
        user=payer.user,
        api_key=payer.api_key,
        tokens=work.hold_tokens,
        work=WorkRef(kind, work.request_id, holder, work.model),
        expires_at=datetime.fromtimestamp(work.deadline, UTC) + EXPIRES_AFTER,
    )


async def end_hold(hold: Hold, *, count: Count | None, bus: Bus) -> None:
    """Charge what was counted, or release the Hold where that is nothing; tried until the database does it."""
    tokens = sum(count or ())
    for attempt in itertools.count():
        try:
            end = await (settle_hold_async(hold=hold, tokens=tokens) if tokens else release_hold_async(hold=hold))
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if bus.is_closing and attempt >= TRIES_WHILE_CLOSING:
                logger.error("a hold is left to the sweep: the database is away", hold_id=str(hold.pk), counted=tokens)
                return
            if attempt == 0:
                logger.warning("a hold ends once the database is back", hold_id=str(hold.pk), error=str(error))
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        else:
            if end.charged != min(tokens, hold.tokens):
                logger.error("a hold had ended", hold_id=str(hold.pk), charged=end.charged, counted=tokens)
            bus.forget_count(hold.work_id)
            return


# Sweeps

# Whether a process lives (1), or has been missing for less than ARGV[1] milliseconds (1), or is dead (0).
_LIVES = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('DEL', KEYS[2]); return 1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[2], string.format('%.0f', now), 'NX', 'EX', 86400)
if now - tonumber(redis.call('GET', KEYS[2])) < tonumber(ARGV[1]) then return 1 end
return 0
"""


def sweep_charges(*, missing_for: timedelta = MISSING_FOR) -> tuple[SweepCount, SweptKeys]:
    """End what API processes that died left behind: their Holds, and the Idempotency-Keys that they answered.

    A process is dead when its key has been missing from Redis for `missing_for`, by the sweeps' own looks. Raises
    RedisError while Redis is away: then nobody is dead. Safe to run twice at once.
    """
    redis: Redis = Redis.from_url(settings.BROKER_URL, socket_timeout=5, socket_connect_timeout=3)
    with redis:
        counted = _count_in(redis)
        find_living = _find_living_in(redis, missing_for)
        total = end_expired_holds(kinds=KINDS, count=counted)
        for kind in KINDS:
            swept = end_orphaned_holds(
                kind=kind,
                find_living=lambda holds: _of_living(holds, find_living),
                # Nothing of the future: the clocks of two hosts differ.
                taken_before=timezone.now(),
                count=counted,
            )
            total = SweepCount(
                settled=total.settled + swept.settled,
                released=total.released + swept.released,
                tokens=total.tokens + swept.tokens,
            )
        # After their Holds: what was charged decides whether a key is free again.
        return total, end_abandoned_keys(find_living=find_living, outcome=_outcome_of_abandoned)


def _count_in(redis: Redis) -> Callable[[Hold], int | None]:
    def count(hold: Hold) -> int | None:
        left = read_count(redis.get(keys.count(hold.work_id)))
        return sum(left) or None if left is not None else None

    return count


def _find_living_in(redis: Redis, missing_for: timedelta) -> Callable[[Collection[str]], Collection[str]]:
    def find_living(processes: Collection[str]) -> Collection[str]:
        looks = redis.pipeline(transaction=False)
        for process in processes:
            looks.eval(
                _LIVES, 2, keys.alive(process), keys.missing(process), str(int(missing_for.total_seconds() * 1000))
            )
        return [process for process, lives in zip(processes, looks.execute(), strict=True) if lives == 1]

    return find_living


def _of_living(holds: Sequence[Hold], find_living: Callable[[Collection[str]], Collection[str]]) -> set[uuid.UUID]:
    living = set(find_living({hold.holder for hold in holds}))
    return {hold.pk for hold in holds if hold.holder in living}


def _outcome_of_abandoned(request_id: str) -> RecordedAnswer | InProgress | None:
    """What the retries of a request get whose API process died: an error if it was charged, else a fresh start."""
    holds = Hold.objects.filter(work_kind__in=KINDS, work_id=request_id)
    hold = holds.exclude(state=Hold.State.RELEASED).first()
    if hold is None:
        return None
    if hold.state == Hold.State.LIVE:
        return InProgress(hold.holder, request_id)
    error = ApiError(
        ErrorCode.ENGINE_ERROR,
        f"The API process that ran this request died before its answer was kept; {hold.charged:,} tokens were "
        "charged. Send it with another Idempotency-Key to run it again.",
    )
    return recorded_error(error)


def recorded_error(error: ApiError) -> RecordedAnswer:
    """`error` as it is kept for retries."""
    headers = {"Content-Type": "application/json", **error.headers}
    return RecordedAnswer(error.status, headers, render_json(error.body()))
