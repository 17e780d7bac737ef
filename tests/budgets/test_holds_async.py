"""The same steps from an async view, on the async pool."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from accounts.models import ApiKey, User
from acsinfra.core.db import async_pool, close_async_pool, database_step
from budgets.errors import BudgetExceeded, HoldConflict
from budgets.models import Hold, WorkKind
from budgets.selectors import BudgetSummary, budget_summary_async, imbalances
from budgets.services import (
    HoldEnd,
    WorkRef,
    release_hold_async,
    settle_hold,
    settle_hold_async,
    take_hold,
    take_hold_async,
)
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def user(transactional_db: None) -> User:
    return make_user(monthly_tokens=1_000)


@pytest.fixture
def key(user: User) -> ApiKey:
    return make_key(user, cap=500)


@pytest.fixture(autouse=True)
async def _pool_of_this_loop() -> AsyncIterator[None]:
    yield
    await close_async_pool()


class Statements:
    """Counts what is sent to PostgreSQL on async connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        execute = psycopg.AsyncCursor.execute

        async def counted(cursor: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            self.sent.append(str(query))
            return await execute(cursor, query, *args, **kwargs)

        monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)

    def take(self) -> int:
        """How many were sent since the last look."""
        count = len(self.sent)
        self.sent.clear()
        return count


async def test_each_step_is_one_statement(user: User, key: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = Statements(monkeypatch)
    first = await take_hold_async(user=user, api_key=key, tokens=5, work=new_work())
    statements.take()
    hold = await take_hold_async(user=user, api_key=key, tokens=5, work=new_work())
    assert statements.take() == 1
    assert (await settle_hold_async(hold=hold, tokens=3)).changed
    assert statements.take() == 1
    assert (await release_hold_async(hold=first)).changed
    assert statements.take() == 1
    await budget_summary_async(user)
    assert statements.take() == 1
    with pytest.raises(BudgetExceeded):
        await take_hold_async(user=user, api_key=key, tokens=498, work=new_work())
    assert statements.take() == 2


async def test_a_hold_of_the_async_pool_is_the_row_that_sync_code_sees(user: User, key: ApiKey) -> None:
    hold = await take_hold_async(
        user=user, api_key=key, tokens=120, work=new_work(holder="api-1"), expires_at=datetime(2030, 1, 1, tzinfo=UTC)
    )
    stored = await database_step(Hold.objects.get, pk=hold.pk)
    assert [getattr(hold, field.attname) for field in Hold._meta.concrete_fields] == [
        getattr(stored, field.attname) for field in Hold._meta.concrete_fields
    ]
    ended = await settle_hold_async(hold=stored, tokens=45)
    assert ended == HoldEnd(changed=True, state=Hold.State.SETTLED, charged=45)
    again = await release_hold_async(hold=hold.pk)
    assert again == HoldEnd(changed=False, state=Hold.State.SETTLED, charged=45)
    summary = await budget_summary_async(user)
    assert (summary.used, summary.held, summary.keys[0].used) == (45, 0, 45)
    assert await database_step(imbalances) == []


async def test_what_does_not_fit_is_refused(user: User, key: ApiKey) -> None:
    with pytest.raises(BudgetExceeded, match="500 under the cap of this API key are left"):
        await take_hold_async(user=user, api_key=key, tokens=501, work=new_work())
    with pytest.raises(BudgetExceeded, match="1,000 of your Budget are left"):
        await take_hold_async(user=user, api_key=None, tokens=1_001, work=new_work(WorkKind.APP))


async def test_work_that_was_charged_cannot_hold_again(user: User, key: ApiKey) -> None:
    work = new_work()
    hold = await take_hold_async(user=user, api_key=key, tokens=5, work=work)
    await settle_hold_async(hold=hold, tokens=5)
    with pytest.raises(HoldConflict):
        await take_hold_async(user=user, api_key=key, tokens=5, work=work)


async def test_a_database_that_dropped_its_connections_charges_once(user: User, key: ApiKey) -> None:
    """Each connection of the pool is cut, as by a restart: the step is sent again on another one."""
    hold = await take_hold_async(user=user, api_key=key, tokens=100, work=new_work())
    await _cut_connections()
    assert (await settle_hold_async(hold=hold, tokens=60)).charged == 60
    await _cut_connections()
    await take_hold_async(user=user, api_key=key, tokens=7, work=new_work())
    summary = await budget_summary_async(user)
    assert (summary.used, summary.held) == (60, 7)


async def _cut_connections() -> None:
    pool = await async_pool()
    await pool.wait()
    connections = [await pool.getconn() for _ in range(pool.get_stats()["pool_size"])]
    pids = [connection.info.backend_pid for connection in connections]
    for connection in connections:
        await pool.putconn(connection)

    def cut() -> None:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [pids])
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [pids])

    await database_step(cut)


async def test_a_take_that_meets_the_end_of_its_work_does_not_hang(user: User, key: ApiKey) -> None:
    """A retry of work against the settling of its Hold, many times: each ends, and nothing is charged twice."""
    for _ in range(30):
        work = new_work()
        hold = await take_hold_async(user=user, api_key=key, tokens=3, work=work)
        again, ended = await asyncio.gather(
            take_hold_async(user=user, api_key=key, tokens=3, work=work),
            settle_hold_async(hold=hold, tokens=1),
            return_exceptions=True,
        )
        assert ended == HoldEnd(changed=True, state=Hold.State.SETTLED, charged=1)
        assert isinstance(again, HoldConflict) or (isinstance(again, Hold) and again.pk == hold.pk)
    summary: BudgetSummary = await budget_summary_async(user)
    assert (summary.used, summary.held) == (30, 0)


async def test_a_request_that_goes_away_while_it_takes_its_hold_has_none(user: User, key: ApiKey) -> None:
    outcomes: list[Hold | BaseException] = []
    for n_turns in range(60):
        taking = asyncio.create_task(take_hold_async(user=user, api_key=key, tokens=1, work=new_work()))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        taking.cancel()
        outcomes += await asyncio.gather(taking, return_exceptions=True)
    n_held = sum(isinstance(outcome, Hold) for outcome in outcomes)
    assert {type(outcome) for outcome in outcomes} <= {Hold, asyncio.CancelledError}
    assert n_held < len(outcomes)
    assert (await budget_summary_async(user)).held == n_held
    assert await database_step(imbalances) == []


async def test_an_end_that_was_begun_happens_though_its_request_is_cancelled(user: User, key: ApiKey) -> None:
    holds = [await take_hold_async(user=user, api_key=key, tokens=5, work=new_work()) for _ in range(2)]
    ends = [settle_hold_async(hold=holds[0], tokens=3), release_hold_async(hold=holds[1])]
    tasks = [asyncio.create_task(end) for end in ends]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
    summary = await budget_summary_async(user)
    assert (summary.used, summary.held) == (3, 0)


async def test_a_waiting_request_costs_no_connection(user: User, key: ApiKey) -> None:
    """Between its Hold and its end a request holds no connection: 200 wait, and the pool of 8 serves another."""
    first = await take_hold_async(user=user, api_key=key, tokens=0, work=new_work())
    all_hold, finish = asyncio.Event(), asyncio.Event()
    held: list[Hold] = []

    async def request() -> None:
        hold = await take_hold_async(user=user, api_key=key, tokens=1, work=new_work())
        held.append(hold)
        if len(held) == 200:
            all_hold.set()
        await finish.wait()
        await settle_hold_async(hold=hold, tokens=1)

    requests = [asyncio.create_task(request()) for _ in range(200)]
    await all_hold.wait()
    assert (await budget_summary_async(user)).held == 200
    assert (await settle_hold_async(hold=first, tokens=0)).changed
    finish.set()
    await asyncio.gather(*requests)
    assert (await budget_summary_async(user)).used == 200


def test_sync_code_goes_on_with_what_async_code_held(user: User, key: ApiKey) -> None:
    work = new_work()

    async def hold() -> Hold:
        taken = await take_hold_async(user=user, api_key=key, tokens=9, work=work)
        await close_async_pool()
        return taken

    taken = asyncio.run(hold())
    again = take_hold(user=user, api_key=key, tokens=9, work=WorkRef(WorkKind(taken.work_kind), taken.work_id))
    assert again.pk == taken.pk
    assert settle_hold(hold=again, tokens=4).charged == 4
