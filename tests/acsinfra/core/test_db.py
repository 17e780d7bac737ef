"""Steps on PostgreSQL take a connection and give it back; a database that is away shows within seconds."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from django.db import OperationalError, connections
from django.db import connection as orm_connection

from accounts.models import User
from acsinfra.core import db
from tests.live_server import make_user
from tests.tcp_proxy import TcpProxy, proxy_to

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def pool() -> AsyncIterator[db.Pool]:
    yield await db.async_pool()
    await db.close_async_pool()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """Return a way to the database that can be cut; new pools go through it."""
    settings = connections["default"].settings_dict
    with proxy_to(int(settings["PORT"])) as proxy:
        monkeypatch.setitem(settings, "PORT", proxy.port)
        monkeypatch.setitem(settings, "HOST", "127.0.0.1")
        yield proxy


async def test_a_pool_is_made_once_for_a_loop_and_speaks_to_django_s_database(pool: db.Pool) -> None:
    assert await db.async_pool() is pool
    row = await db.fetch_one(
        "SELECT current_database(), current_setting('statement_timeout'), current_setting('TimeZone')"
    )
    assert row == (orm_connection.settings_dict["NAME"], "10s", "UTC")


async def test_waiting_requests_hold_no_connection(pool: db.Pool) -> None:
    """200 requests that have each taken a step wait for one another, and then take another."""
    n_waiting, all_wait = 0, asyncio.Event()

    async def request() -> None:
        nonlocal n_waiting
        await db.fetch_one("SELECT 1")
        n_waiting += 1
        if n_waiting == 200:
            all_wait.set()
        await all_wait.wait()
        await db.fetch_one("SELECT 1")

    # If each held its connection meanwhile, all but the first 8 would never get to wait.
    async with asyncio.timeout(120):
        await asyncio.gather(*(request() for _ in range(200)))
    assert pool.get_stats()["pool_size"] <= 8


async def test_a_burst_waits_its_turn_longer_than_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "GET_CONNECTION_SECONDS", 0.5)
    started = time.monotonic()
    rows = await asyncio.gather(*(db.fetch_one("SELECT pg_sleep(0.1)") for _ in range(96)))
    assert time.monotonic() - started > 1.0
    assert len(rows) == 96
    await db.close_async_pool()


async def test_a_burst_that_finds_no_connection_yet_waits_for_the_first(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that just started on a busy machine: connecting takes longer than a database that is away may."""
    monkeypatch.setattr(db, "GET_CONNECTION_SECONDS", 0.2)
    proxy.slow_seconds = 0.7
    rows = await asyncio.gather(*(db.fetch_one("SELECT 7") for _ in range(64)))
    assert rows == [(7,)] * 64
    await db.close_async_pool()


async def test_a_burst_of_steps_of_the_orm_waits_for_its_first_connection(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connections["default"].settings_dict
    options = {**settings["OPTIONS"], "pool": {**settings["OPTIONS"]["pool"], "timeout": 0.2}}
    monkeypatch.setitem(settings, "OPTIONS", options)
    proxy.slow_seconds = 0.7
    made = await asyncio.to_thread(make_user)
    orm_connection.close_pool()  # type: ignore[attr-defined]
    try:
        users = await asyncio.gather(*(db.database_step(User.objects.get, pk=made.pk) for _ in range(64)))
    finally:
        orm_connection.close_pool()  # type: ignore[attr-defined]
    assert users == [made] * 64


async def test_those_who_wait_behind_a_database_that_is_away_fail_with_it(proxy: TcpProxy, pool: db.Pool) -> None:
    proxy.cut()
    started = time.monotonic()
    answers = await asyncio.gather(*(db.fetch_one("SELECT 1") for _ in range(200)), return_exceptions=True)
    assert all(isinstance(answer, psycopg.OperationalError) for answer in answers)
    # Far from what 8 at once, each as patient as the first, would take.
    assert time.monotonic() - started < 200 / 8 * db.GET_CONNECTION_SECONDS / 2


async def test_a_failed_statement_leaves_a_usable_connection(pool: db.Pool) -> None:
    for _ in range(20):
        with pytest.raises(psycopg.errors.UndefinedTable):
            await db.fetch_one("SELECT * FROM nothing_here")
    assert await db.fetch_one("SELECT %s::int", (5,)) == (5,)


async def test_dead_connections_are_replaced_without_an_error(proxy: TcpProxy, pool: db.Pool) -> None:
    await asyncio.gather(*(db.fetch_one("SELECT pg_sleep(0.1)") for _ in range(8)))
    proxy.cut()
    proxy.mend()
    assert await asyncio.gather(*(db.fetch_one("SELECT 7") for _ in range(20))) == [(7,)] * 20


async def test_a_database_that_is_away_fails_within_seconds_and_comes_back_at_once(
    proxy: TcpProxy, pool: db.Pool
) -> None:
    proxy.cut()
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            await db.fetch_one("SELECT 1")
        # Long before a burst of requests would give up.
        assert time.monotonic() - started < db.TURN_SECONDS / 2
    proxy.mend()
    assert await fetch_when_back() == (1,)


async def fetch_when_back() -> db.Row | None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return await db.fetch_one("SELECT 1")
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise


async def test_a_database_step_gives_its_connection_back(pool: db.Pool) -> None:
    made = await db.database_step(make_user)
    names = await asyncio.gather(*(db.database_step(User.objects.get, pk=made.pk) for _ in range(50)))
    assert {user.username for user in names} == {made.username}

    def n_taken() -> int:
        stats = orm_connection.pool.get_stats()  # type: ignore[attr-defined]
        return int(stats["pool_size"] - stats["pool_available"])

    # One is the test's own; those that the pool still opens are counted as taken, too.
    give_up_at = time.monotonic() + 30
    while await asyncio.to_thread(n_taken) > 1:
        assert time.monotonic() < give_up_at, "a connection was not given back"
        await asyncio.sleep(0.02)


async def test_a_database_step_raises_what_the_step_raises(pool: db.Pool) -> None:
    with pytest.raises(User.DoesNotExist):
        await db.database_step(User.objects.get, pk=-1)


async def test_a_restart_of_the_database_costs_the_orm_s_steps_one_error_at_most(pool: db.Pool) -> None:
    """The connections that it left dead in the pool cost one error together, not one each."""
    together = threading.Barrier(4)

    def backend() -> int:
        with orm_connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pid: int = cursor.fetchone()[0]
        together.wait(60)
        return pid

    pids = await asyncio.gather(*(db.database_step(backend) for _ in range(4)))
    assert len(set(pids)) == 4
    # Until each has ended: one that still lives while another is missed would cost an error of its own.
    ended = await db.fetch_one("SELECT bool_and(pg_terminate_backend(pid, 9000)) FROM unnest(%s::int[]) AS pid", [pids])
    assert ended == (True,)
    errors = 0
    for _ in range(6):
        try:
            await db.database_step(User.objects.count)
        except OperationalError:
            errors += 1
    assert errors == 1
