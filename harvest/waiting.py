"""Waiting for a job's status to change, however many wait: one small query a quarter of a second for a process."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final
from weakref import WeakKeyDictionary

import psycopg
import structlog
from redis.exceptions import RedisError

from acsinfra.core.courier import BrokerAway, shared_courier
from acsinfra.core.db import connection

logger = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.25
AWAY_SECONDS: Final = 1.0
# A place is given up by itself when its API process dies: this long after its wait should have ended.
GRACE_SECONDS: Final = 10
_CLAIM: Final = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
if redis.call('TTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return 1
"""


class StatusWatch:
    """Sees for all waiting requests of one event loop when a job's status is another than they saw."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], tuple[uuid.UUID, str]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait_for_change(self, job_id: uuid.UUID, *, seen: str, seconds: float) -> None:
        """Return once the job's status is not `seen` any more (or the job is gone), or `seconds` are over."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[changed] = (job_id, seen)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="harvest-status-watch")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed
        finally:
            self._waiting.pop(changed, None)

    async def _look(self) -> None:
        while self._waiting:
            pause = LOOK_SECONDS
            try:
                await self._wake_changed()
            except psycopg.Error as error:
                logger.warning("the database is away; waiting requests go on waiting", reason=type(error).__name__)
                pause = AWAY_SECONDS
            await asyncio.sleep(pause)

    async def _wake_changed(self) -> None:
        waiting = dict(self._waiting)
        ids = list({job_id for job_id, _ in waiting.values()})
        async with connection() as database:
            cursor = await database.execute("SELECT id, status FROM harvest_harvestjob WHERE id = ANY(%s)", [ids])
            statuses: dict[uuid.UUID, str] = dict(await cursor.fetchall())
        for changed, (job_id, seen) in waiting.items():
            if statuses.get(job_id) != seen and not changed.done():
                changed.set_result(None)


@asynccontextmanager
async def take_place(key: str, *, seconds: int, at_once: int) -> AsyncGenerator[bool]:
    """Whether `key` has one of its `at_once` places for a wait of `seconds`; it goes back at the block's end.

    Redis counts, right across API processes. No place when the broker is away: an answer at once does no harm.
    """
    courier = shared_courier()
    place, name = secrets.token_hex(8), f"acs:harvest-waits:{key}"
    expiry = seconds + GRACE_SECONDS
    try:
        try:
            is_taken = await courier.ask("EVAL", _CLAIM, 1, name, place, at_once, expiry, patience=1.0) == 1
        except (BrokerAway, RedisError):
            is_taken = False
        yield is_taken
    finally:
        # Also where the client went away while it was asked for.
        courier.post("ZREM", name, place, patience=GRACE_SECONDS)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, StatusWatch] = WeakKeyDictionary()


async def wait_for_change(job_id: uuid.UUID, *, seen: str, seconds: int, key: str, at_once: int) -> bool:
    """Wait up to `seconds` for the job's status to be another than `seen`.

    False: `at_once` requests of `key` wait already.
    """
    loop = asyncio.get_running_loop()
    if loop not in _watches:
        _watches[loop] = StatusWatch()
    async with take_place(key, seconds=seconds, at_once=at_once) as has_place:
        if has_place:
            await _watches[loop].wait_for_change(job_id, seen=seen, seconds=seconds)
        return has_place
