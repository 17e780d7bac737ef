"""PostgreSQL from async views: each step takes a connection and gives it back, so that a waiting request holds none.

The ORM in an async view would keep its pooled connection for as long as the request waits. Hot steps are raw SQL
through `connection()` or `fetch_one`; everything else is a sync function through `database_step`.
"""

import asyncio
import contextvars
import functools
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

import psycopg
from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, close_old_connections, connections
from psycopg import AsyncConnection
from psycopg.abc import Params
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

POOL_SIZE = (2, 8)
# A database that is away must show within seconds: waiting for a connection, connecting, and a dead network.
GET_CONNECTION_SECONDS = 3.0
CONNECT_SECONDS = 5
# A burst of requests, or a busy machine on which connecting takes its time, is no outage: it is waited for this long.
TURN_SECONDS = 30.0
DEAD_NETWORK_MS = 5_000
STATEMENT_MS = 10_000

type Row = tuple[Any, ...]


class Pool(AsyncConnectionPool[AsyncConnection[Row]]):
    """A pool that tells a burst of steps, which take turns, from a database that is away, which ends their wait.

    Away is a database to which connecting failed. That no connection came in time says nothing by itself: a process
    that just started opens its first ones while its first requests keep a busy machine from doing so.
    """

    def __init__(self, **options: Any) -> None:
        """Make a pool; `max_size` steps have their turn at once."""
        super().__init__(**options)
        self._turns = asyncio.Semaphore(self.max_size)
        self._failed_at = -math.inf

    def connection(self, timeout: float | None = None) -> "_Turn":  # type: ignore[override]
        """A connection for one step. Raises PoolTimeout within seconds when there is none to be had."""
        return _Turn(self, timeout)

    async def take_turn(self) -> None:
        """Wait for one of the turns, which `give_turn_back` ends. Raises PoolTimeout."""
        began = time.monotonic()
        await self._wait_for_turn()
        # Whoever has waited while another got none need not try for as long again.
        if self._failed_at > began:
            self._failed_at = time.monotonic()
            self._turns.release()
            raise PoolTimeout("the database is away")

    def give_turn_back(self) -> None:
        """The step is over."""
        self._turns.release()

    async def _wait_for_turn(self) -> None:
        if not self._turns.locked():
            # At once, without a timer.
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise PoolTimeout(f"no turn on the database within {TURN_SECONDS:g} s") from None

    async def getconn(self, timeout: float | None = None) -> AsyncConnection[Row]:  # noqa: ASYNC109 (as above)
        """A connection, waited for while connecting is under way. Raises PoolTimeout once that has failed."""
        give_up_at = time.monotonic() + TURN_SECONDS
        while True:
            failures = _failures(self)
            try:
                return await super().getconn(timeout)
            except PoolTimeout:
                if _failures(self) > failures or time.monotonic() >= give_up_at:
                    self._failed_at = time.monotonic()
                    raise


class _Turn:
    """psycopg_pool's `connection()`, in turn, and without a commit of what an autocommit connection has committed.

    A class, because a generator as a context manager, around another one, costs a statement a tenth of its time.
    """

    __slots__ = ("_pool", "_taken", "_timeout")

    def __init__(self, pool: Pool, timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout
        self._taken: AsyncConnection[Row] | None = None

    async def __aenter__(self) -> AsyncConnection[Row]:
        pool = self._pool
        await pool.take_turn()
        try:
            taken = self._taken = await pool.getconn(self._timeout)
        except BaseException:
            pool.give_turn_back()
            raise
        return taken

    async def __aexit__(self, *raised: Any) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None
        try:
            if raised[0] is not None or taken.info.transaction_status is not TransactionStatus.IDLE:
                await taken.__aexit__(*raised)
        finally:
            try:
                await self._pool.putconn(taken)
            finally:
                self._pool.give_turn_back()


def _failures(pool: "AsyncConnectionPool[Any] | ConnectionPool[Any]") -> int:
    """How often connecting has failed in this pool."""
    return pool.get_stats().get("connections_errors", 0)


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Pool] = WeakKeyDictionary()


def _connection_arguments() -> dict[str, Any]:
    settings = connections["default"].settings_dict
    named = {
        "dbname": settings["NAME"],
        "user": settings["USER"],
        "password": settings["PASSWORD"],
        "host": settings["HOST"],
        "port": settings["PORT"],
    }
    options = {name: value for name, value in settings["OPTIONS"].items() if name != "pool"}
    return {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": DEAD_NETWORK_MS,
        "options": f"-c statement_timeout={STATEMENT_MS} -c timezone=UTC",
        "application_name": "acsinfra api",
        **{name: value for name, value in named.items() if value},
        **options,
    }


async def async_pool() -> Pool:
    """The event loop's own pool of 2 to 8 autocommit connections, opened at its first use."""
    loop = asyncio.get_running_loop()
    pool = _pools.get(loop)
    if pool is None:
        low, high = POOL_SIZE
        pool = _pools[loop] = Pool(
            min_size=low,
            max_size=high,
            timeout=GET_CONNECTION_SECONDS,
            # Past this an attempt ends and the next request begins another: no long back-off after an outage.
            reconnect_timeout=GET_CONNECTION_SECONDS,
            max_idle=300,
            kwargs={**_connection_arguments(), "autocommit": True},
            open=False,
        )
        await pool.open()
    return pool


async def close_async_pool() -> None:
    """Close the running event loop's pool, if it has one."""
    pool = _pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()


@asynccontextmanager
async def connection() -> AsyncGenerator[AsyncConnection[Row]]:
    """An autocommit connection for one step; raises psycopg.OperationalError within seconds when there is none."""
    pool = await async_pool()
    async with pool.connection() as taken:
        yield taken


async def fetch_one(query: LiteralString, params: Params = ()) -> Row | None:
    """The first row of a read. It is sent once more when the database had restarted and left dead connections."""
    pool = await async_pool()
    for is_retry in (False, True):
        async with pool.connection() as taken:
            try:
                return await (await taken.execute(query, params)).fetchone()
            except psycopg.OperationalError:
                if is_retry or not taken.broken:
                    raise
        await pool.check()
    return None


async def database_step[**P, R](step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `step`, a sync function that uses the ORM, in a thread, and give its connection back at its end."""
    context = contextvars.copy_context()

    def run() -> R:
        try:
            _take_connection()
            return context.run(step, *args, **kwargs)
        except (OperationalError, InterfaceError):
            drop_dead_connections()
            raise
        finally:
            connections.close_all()

    return await asyncio.get_running_loop().run_in_executor(_threads(), run)


@contextmanager
def planning_once() -> Generator[psycopg.Cursor[Row]]:
    """A cursor on this thread's connection of Django's, for statements that take as long to plan as to run.

    PostgreSQL parses, and soon plans, each of them once for a connection; Django's own cursors put the values into the
    text and have it done each time.
    """
    orm = connections["default"]
    orm.ensure_connection()
    # Django switches this off, and its own cursors never prepare.
    orm.connection.prepare_threshold = 2
    with orm.wrap_database_errors, psycopg.Cursor(orm.connection) as cursor:
        yield cursor


async def give_back_connection() -> None:
    """Give back the connection by which Django read a session for an async view, which would keep it while it waits."""
    await sync_to_async(_give_back)()


def _give_back() -> None:
    # Closing it would end a transaction that is under way.
    if not connections["default"].in_atomic_block:
        close_old_connections()


def _take_connection() -> None:
    """Take this thread's connection of the ORM's pool, waited for as `Pool.getconn` does."""
    orm: Any = connections["default"]
    give_up_at = time.monotonic() + TURN_SECONDS
    while True:
        failures = _failures(orm.pool)
        try:
            orm.ensure_connection()
        except OperationalError as error:
            is_slow = isinstance(error.__cause__, PoolTimeout) and _failures(orm.pool) == failures
            if not is_slow or time.monotonic() >= give_up_at:
                raise
        else:
            return


def drop_dead_connections() -> None:
    """Have the ORM's pool give none of the connections that a restart of the database left dead."""
    pool = getattr(connections["default"], "pool", None)
    if pool is not None:
        pool.check()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=POOL_SIZE[1], thread_name_prefix="database-step")
