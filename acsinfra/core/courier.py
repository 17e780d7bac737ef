"""One pipelined connection to Redis for everything that one event loop sends.

However many coroutines send, there is one connection: what they ask for while a round trip is under way goes out
together in the next. (`redis.asyncio`'s pool takes a connection for each waiting coroutine.) Commands must be safe to
run twice, because a connection lost under way leaves open whether they ran.
"""

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from contextvars import Context
from weakref import WeakKeyDictionary

import structlog
from django.conf import settings
from redis.asyncio.connection import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

logger = structlog.get_logger(__name__)

Value = str | bytes | int | float
# Connection losses, as redis-py and the event loop report them; a server that is still loading counts as one.
LOST = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError)

BATCH_COMMANDS = 256
BATCH_BYTES = 2 * 1024 * 1024
RETRY_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3)


class BrokerAway(ConnectionError):
    """Redis could not be reached for as long as the command was worth trying: `503 service_unavailable`."""


def make_connection(url: str) -> Connection:
    """A connection of its own to `url` (`redis://`, `rediss://`, `unix://`), not yet open and not retrying."""
    pool: ConnectionPool = ConnectionPool.from_url(
        url, protocol=2, socket_timeout=15, socket_connect_timeout=3, retry=Retry(NoBackoff(), 0)
    )
    connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


async def open_connection(connection: Connection) -> None:
    """Connect, with the URL's password and database."""
    await connection.connect()  # type: ignore[no-untyped-call]


async def _open(connection: Connection) -> None:
    """Connect; a server that refuses the URL's user or database is as good as away, until an operator mends that."""
    try:
        await open_connection(connection)
    except LOST:
        raise
    except RedisError as error:
        raise RedisConnectionError(str(error)) from error


class _Command:
    __slots__ = ("answer", "arguments", "give_up_at", "size")

    def __init__(self, arguments: tuple[Value, ...], give_up_at: float, answer: asyncio.Future[object] | None) -> None:
        self.arguments = arguments
        self.give_up_at = give_up_at
        self.answer = answer
        self.size = sum(len(argument) for argument in arguments if isinstance(argument, (bytes, str)))


class Courier:
    """Sends commands in order over one connection and retries them while Redis is away.

    Make it inside a running event loop and use it there only.
    """

    def __init__(self, url: str) -> None:
        self._connection = make_connection(url)
        self._pending: deque[_Command] = deque()
        self._wakeup = asyncio.Event()
        self._is_closing = False
        self.connected_at = 0.0
        self._task = asyncio.create_task(self._run(), name="courier")

    def post(self, *arguments: Value, patience: float = math.inf) -> None:
        """Send a command whose answer nobody needs; it is tried for `patience` seconds."""
        self._enqueue(_Command(arguments, time.monotonic() + patience, None))

    def ask(self, *arguments: Value, patience: float = 5.0) -> asyncio.Future[object]:
        """Send a command; the future has its answer, or raises BrokerAway or redis-py's ResponseError."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._enqueue(_Command(arguments, time.monotonic() + patience, answer))
        return answer

    async def close(self, *, within: float = 3.0) -> None:
        """Send what is pending, for at most `within` seconds, and close the connection."""
        self._is_closing = True
        self._wakeup.set()
        _, late = await asyncio.wait([self._task], timeout=within)
        for task in late:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._refuse(self._pending)
        await self._connection.disconnect(nowait=True)

    def _enqueue(self, command: _Command) -> None:
        if self._task.done():
            if command.answer is not None:
                command.answer.set_exception(BrokerAway("The connection to the broker is closed."))
            return
        self._pending.append(command)
        self._wakeup.set()

    async def _run(self) -> None:
        failures = 0
        while self._pending or not self._is_closing:
            if not self._pending:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            batch = self._next_batch()
            try:
                answers = await self._exchange(batch)
            except LOST as error:
                await self._connection.disconnect(nowait=True)
                if failures == 0:
                    logger.warning("The broker is away; trying again.", error=str(error))
                self._pending.extendleft(reversed(batch))
                self._drop_expired()
                await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
                continue
            if failures:
                logger.info("The broker is back.")
            failures = 0
            for command, answer in zip(batch, answers, strict=True):
                self._deliver(command, answer)

    def _next_batch(self) -> list[_Command]:
        batch: list[_Command] = []
        size = 0
        while self._pending and len(batch) < BATCH_COMMANDS and (not batch or size < BATCH_BYTES):
            command = self._pending.popleft()
            # Its asker has gone away: nothing that is asked for is worth doing unheard.
            if command.answer is not None and command.answer.done():
                continue
            size += command.size
            batch.append(command)
        return batch

    async def _exchange(self, batch: list[_Command]) -> list[object]:
        if not batch:
            return []
        connection = self._connection
        if not connection.is_connected:
            await _open(connection)
            self.connected_at = time.monotonic()
        packed = [part for command in batch for part in connection.pack_command(*command.arguments)]
        await connection.send_packed_command(b"".join(packed), check_health=False)
        answers: list[object] = []
        for _ in batch:
            try:
                answers.append(await connection.read_response(disable_decoding=True))
            except LOST:
                raise
            except RedisError as error:
                answers.append(error)
        return answers

    def _deliver(self, command: _Command, answer: object) -> None:
        if command.answer is None:
            if isinstance(answer, Exception):
                logger.error("The broker refused a command.", command=str(command.arguments[0]), error=str(answer))
        elif command.answer.done():
            return
        elif isinstance(answer, Exception):
            command.answer.set_exception(answer)
        else:
            command.answer.set_result(answer)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        expired = [command for command in self._pending if command.give_up_at <= now]
        if expired:
            self._pending = deque(command for command in self._pending if command.give_up_at > now)
            self._refuse(expired)

    def _refuse(self, commands: "deque[_Command] | list[_Command]") -> None:
        for command in commands:
            if command.answer is not None and not command.answer.done():
                command.answer.set_exception(BrokerAway("The broker is away."))


_couriers: WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = WeakKeyDictionary()


def shared_courier() -> Courier:
    """The courier of the running event loop, for small commands of whoever has none of their own."""
    loop = asyncio.get_running_loop()
    courier = _couriers.get(loop)
    if courier is None:
        # Its task outlives the first request, whose id must not stand in its log lines.
        courier = _couriers[loop] = Context().run(Courier, settings.BROKER_URL)
    return courier


async def close_shared_courier() -> None:
    """Close the running event loop's shared courier, if it has one."""
    courier = _couriers.pop(asyncio.get_running_loop(), None)
    if courier is not None:
        await courier.close()
