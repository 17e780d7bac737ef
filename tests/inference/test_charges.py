"""The Holds of Completions, whatever dies: ended once, by the last count that anyone has."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
import redis
from django.conf import settings
from django.db import connections
from django.utils import timezone

from accounts.models import User
from acsinfra.core import db, idempotency
from acsinfra.core.idempotency import InProgress, RecordedAnswer, SweptKeys
from budgets.models import Hold, WorkKind
from budgets.selectors import budget_summary, imbalances
from budgets.services import SweepCount, WorkRef, settle_hold, take_hold
from inference.bus import keys
from inference.bus.api import Bus
from inference.charges import Payer, end_hold, hold_for, sweep_charges
from inference.wire import CompletionWork, Sampling
from tests.budgets.people import make_key, make_user
from tests.tcp_proxy import TcpProxy, proxy_to

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

NOW = timedelta(0)
NOTHING = (SweepCount(), SweptKeys())


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    """Return the broker of this process's settings."""
    with redis.Redis.from_url(settings.BROKER_URL) as client:
        yield client


@pytest.fixture
def user() -> Iterator[User]:
    user = make_user(monthly_tokens=1_000)
    yield user
    assert imbalances() == []


def take(user: User, *, holder: str, tokens: int = 100, kind: WorkKind = WorkKind.COMPLETION, **fields: object) -> Hold:
    work = WorkRef(kind, f"req_{uuid.uuid4().hex}", holder)
    return take_hold(user=user, api_key=None, tokens=tokens, work=work, **fields)  # type: ignore[arg-type]


def process() -> str:
    return uuid.uuid4().hex


# The sweep


@pytest.mark.parametrize("kind", [WorkKind.COMPLETION, WorkKind.APP])
def test_the_hold_of_a_dead_process_is_charged_what_a_worker_counted_last(
    user: User, broker: redis.Redis, kind: WorkKind
) -> None:
    hold = take(user, holder=process(), kind=kind)
    broker.set(keys.count(hold.work_id), "30 4", ex=60)
    assert sweep_charges(missing_for=NOW) == (SweepCount(settled=1, tokens=34), SweptKeys())
    assert sweep_charges(missing_for=NOW) == NOTHING
    assert (budget_summary(user).used, budget_summary(user).held) == (34, 0)


@pytest.mark.parametrize("count", [None, "0 0"])
def test_the_hold_of_a_dead_process_is_released_where_nothing_was_counted(
    user: User, broker: redis.Redis, count: str | None
) -> None:
    hold = take(user, holder=process())
    if count is not None:
        broker.set(keys.count(hold.work_id), count, ex=60)
    assert sweep_charges(missing_for=NOW) == (SweepCount(released=1), SweptKeys())
    assert budget_summary(user).remaining == 1_000


def test_a_charge_is_never_more_than_the_hold(user: User, broker: redis.Redis) -> None:
    hold = take(user, holder=process())
    broker.set(keys.count(hold.work_id), "90 90", ex=60)
    assert sweep_charges(missing_for=NOW)[0] == SweepCount(settled=1, tokens=100)


def test_the_holds_of_the_living_and_of_other_work_are_left_alone(user: User, broker: redis.Redis) -> None:
    living = process()
    broker.set(keys.alive(living), "1", px=600_000)
    take(user, holder=living)
    take(user, holder=process(), kind=WorkKind.JOB)
    take(user, holder=process(), kind=WorkKind.HARVEST, expires_at=timezone.now() - timedelta(days=1))
    assert sweep_charges(missing_for=NOW) == NOTHING
    assert budget_summary(user).held == 300


def test_a_process_that_is_back_before_long_was_never_dead(user: User, broker: redis.Redis) -> None:
    """Redis came back empty, and knows the process again with its next renewal."""
    missing = process()
    take(user, holder=missing)
    short = timedelta(seconds=0.3)
    assert sweep_charges(missing_for=short) == NOTHING
    broker.set(keys.alive(missing), "1", px=600_000)
    time.sleep(0.3)
    assert sweep_charges(missing_for=short) == NOTHING
    # And its next absence counts from its own beginning.
    broker.delete(keys.alive(missing))
    assert sweep_charges(missing_for=short) == NOTHING
    time.sleep(0.3)
    assert sweep_charges(missing_for=short)[0] == SweepCount(released=1)


def test_a_hold_that_a_living_process_forgot_ends_when_it_expires(user: User, broker: redis.Redis) -> None:
    living = process()
    broker.set(keys.alive(living), "1", px=600_000)
    hold = take(user, holder=living, expires_at=timezone.now() - timedelta(seconds=1))
    broker.set(keys.count(hold.work_id), "5 1", ex=60)
    assert sweep_charges(missing_for=NOW)[0] == SweepCount(settled=1, tokens=6)


# What a dead process was to answer once


@committed
def test_a_key_of_a_dead_process_is_answered_if_its_work_was_charged_and_else_free_again(broker: redis.Redis) -> None:
    user = make_user()
    asked = {
        name: idempotency.idempotent_request(user_id=user.pk, key=name, route="POST /v1/completions", body={})
        for name in ("charged", "settled", "uncounted", "unheld", "living")
    }
    dead, living = process(), process()
    broker.set(keys.alive(living), "1", px=600_000)
    holds = {name: take(user, holder=dead) for name in ("charged", "settled", "uncounted")}
    broker.set(keys.count(holds["charged"].work_id), "3 4", ex=60)
    # The process died between the end of the Hold and the keeping of the answer.
    settle_hold(hold=holds["settled"], tokens=1_234)

    async def begin() -> None:
        for name, request in asked.items():
            reference = holds[name].work_id if name in holds else f"req_{name}"
            holder = living if name == "living" else dead
            assert await idempotency.begin_work(request, holder=holder, reference=reference) is None
        await db.close_async_pool()

    async def look() -> dict[str, RecordedAnswer | InProgress | None]:
        found = {name: await idempotency.find_answer(request) for name, request in asked.items()}
        await db.close_async_pool()
        return found

    asyncio.run(begin())
    expected = SweepCount(settled=1, released=1, tokens=7), SweptKeys(answered=2, freed=2)
    assert [sweep_charges(missing_for=NOW) for _ in range(2)] == [expected, NOTHING]
    found = asyncio.run(look())
    for name, charged in (("charged", b"7 tokens"), ("settled", b"100 tokens")):
        answer = found.pop(name)
        assert isinstance(answer, RecordedAnswer)
        assert answer.status == 502
        assert charged in answer.body
    assert isinstance(found.pop("living"), InProgress)
    assert found == {"uncounted": None, "unheld": None}
    assert budget_summary(user).used == 107
    assert imbalances() == []


# The database goes away


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """Return a way to the database that can be cut; the async pool goes through it."""
    settings_of_default = connections["default"].settings_dict
    with proxy_to(int(settings_of_default["PORT"])) as proxy:
        monkeypatch.setitem(settings_of_default, "PORT", proxy.port)
        monkeypatch.setitem(settings_of_default, "HOST", "127.0.0.1")
        yield proxy


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async def always(model: str) -> bool:
        return True

    bus = Bus(url=settings.BROKER_URL, is_served=always)
    await bus.ready()
    yield bus
    await bus.close()
    await db.close_async_pool()


def work() -> CompletionWork:
    return CompletionWork(
        request_id=f"req_{uuid.uuid4().hex}",
        model="tiny",
        served_model_name="tiny",
        created=0,
        deadline=time.time() + 60,
        prompts=((1, 2),),
        prompt_texts=(None,),
        sampling=Sampling(max_tokens=8),
        hold_tokens=10,
    )


@committed
@pytest.mark.parametrize(("count", "charged"), [((2, 3), 5), (None, 0)])
async def test_a_hold_ends_once_the_database_is_back(
    proxy: TcpProxy, bus: Bus, count: tuple[int, int] | None, charged: int
) -> None:
    def payer() -> Payer:
        user = make_user(monthly_tokens=1_000)
        return Payer(user, make_key(user))

    def money(user: User) -> tuple[int, int, int]:
        summary = budget_summary(user)
        assert imbalances() == []
        return summary.used, summary.held, summary.keys[0].used

    pays = await db.database_step(payer)
    hold = await hold_for(work(), payer=pays, holder=bus.process)
    proxy.cut()
    ending = asyncio.create_task(end_hold(hold, count=count, bus=bus))
    await asyncio.sleep(0.3)
    assert not ending.done()
    proxy.mend()
    async with asyncio.timeout(60):
        await ending
    assert await db.database_step(money, pays.user) == (charged, 0, charged)
