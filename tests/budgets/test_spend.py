"""The Spend limit: GPU time that is recorded once, what it costs, and what is refused past a limit or in a pause."""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.utils import timezone

from accounts.models import User
from acsinfra.core.db import close_async_pool, database_step, fetch_one
from acsinfra.core.errors import ApiError
from budgets import spend
from budgets.models import GpuTime, SpendLimit

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
ENGINE = uuid.UUID(int=5)


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    spend.forget_spending()
    yield
    spend.forget_spending()


def record(now: datetime, *, engine: uuid.UUID = ENGINE, price: str = "2", gpus: int = 3) -> None:
    spend.record_gpu_time(
        engine_id=engine, model="tiny", kind="inference", gpus=gpus, usd_per_gpu_hour=Decimal(price), now=now
    )


def refusal(now: datetime, **limit: Any) -> ApiError | None:
    SpendLimit.objects.update_or_create(pk=1, defaults=limit)
    return spend.read_spending(now=now).refusal()


def test_gpu_time_is_the_seconds_up_times_the_gpus() -> None:
    record(NOON)
    for seconds in (5, 10, 600):
        record(NOON + timedelta(seconds=seconds))
    row = GpuTime.objects.get()
    assert (row.model, row.kind, row.day, row.gpu_seconds) == ("tiny", "inference", date(2026, 11, 15), 1800)
    spent = spend.read_spending(now=NOON + timedelta(hours=1))
    assert spent.usd_today == spent.usd_this_month == 1


def test_recording_twice_or_late_counts_once() -> None:
    record(NOON)
    for seconds in (10, 10, 4, 10):
        record(NOON + timedelta(seconds=seconds))
    assert GpuTime.objects.get().gpu_seconds == 30


def test_time_over_midnights_is_cut_at_each() -> None:
    record(datetime(2026, 11, 29, 23, 59, 50, tzinfo=UTC))
    record(datetime(2026, 12, 1, 0, 0, 20, tzinfo=UTC))
    record(datetime(2026, 12, 1, 0, 0, 30, tzinfo=UTC))
    seconds = {row.day: row.gpu_seconds / 3 for row in GpuTime.objects.all()}
    assert seconds == {date(2026, 11, 29): 10, date(2026, 11, 30): 86_400, date(2026, 12, 1): 30}
    spent = spend.read_spending(now=datetime(2026, 12, 1, 1, tzinfo=UTC))
    assert spent.usd_today == spent.usd_this_month == pytest.approx(Decimal(30 * 3 * 2) / 3600)
    spent = spend.read_spending(now=datetime(2026, 11, 30, 23, tzinfo=UTC))
    assert spent.usd_today == 144
    assert spent.usd_this_month == pytest.approx(144 + Decimal(60) / 3600)


def test_a_changed_price_counts_for_the_day() -> None:
    record(NOON, price="0")
    record(NOON + timedelta(hours=1), price="0")
    record(NOON + timedelta(hours=1), price="0.5")
    assert spend.read_spending(now=NOON + timedelta(hours=2)).usd_today == Decimal("1.5")


def test_engines_add_up() -> None:
    for number in (1, 2):
        record(NOON, engine=uuid.UUID(int=number))
        record(NOON + timedelta(hours=1), engine=uuid.UUID(int=number))
    assert spend.read_spending(now=NOON + timedelta(hours=2)).usd_today == 12


@pytest.mark.django_db(transaction=True)
def test_recorded_at_once_it_counts_once() -> None:
    began = timezone.now() - timedelta(hours=30)
    record(began)
    barrier = threading.Barrier(6)

    def act() -> None:
        barrier.wait()
        try:
            for _ in range(5):
                spend.record_gpu_time(
                    engine_id=ENGINE, model="tiny", kind="runner", gpus=3, usd_per_gpu_hour=Decimal(2)
                )
        finally:
            connection.close()

    threads = [threading.Thread(target=act) for _ in range(6)]
    before = timezone.now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = timezone.now()
    total = sum(row.gpu_seconds for row in GpuTime.objects.all()) / 3
    assert (before - began).total_seconds() <= total <= (after - began).total_seconds()
    assert GpuTime.objects.count() in (2, 3)


# The limit and the pause


def test_without_a_row_all_may_start() -> None:
    assert spend.read_spending().refusal() is None
    assert spend.may_start_work()


def test_under_the_limits_work_may_start() -> None:
    record(NOON)
    record(NOON + timedelta(minutes=10))
    assert refusal(NOON + timedelta(hours=1), usd_per_day=Decimal("1.01"), usd_per_month=Decimal("1.01")) is None


@pytest.mark.parametrize(
    ("limit", "seconds", "words"),
    [
        ({"usd_per_day": 1}, 11 * 3600, "Spend limit of this day is reached, until 2026-11-16T00:00:00.000+00:00"),
        ({"usd_per_month": 1}, 15 * 86_400 + 11 * 3600, "Spend limit of this month"),
        ({"usd_per_day": 1, "usd_per_month": 1}, 15 * 86_400 + 11 * 3600, "this day is reached and the Spend limit"),
        ({"is_paused": True, "pause_ends_at": NOON + timedelta(hours=2)}, 3600, "paused"),
        ({"is_paused": True, "pause_ends_at": NOON + timedelta(hours=2), "usd_per_day": 0}, 11 * 3600, "paused"),
    ],
)
def test_what_ends_by_itself_says_when(limit: dict[str, Any], seconds: int, words: str) -> None:
    record(NOON)
    record(NOON + timedelta(minutes=10))
    error = refusal(NOON + timedelta(hours=1), **limit)
    assert error is not None
    assert (error.status, error.code, error.headers) == (429, "spend_cap", {"Retry-After": str(seconds)})
    assert words in error.message


def test_a_pause_without_an_end_is_not_retried() -> None:
    error = refusal(NOON, is_paused=True, usd_per_day=0)
    assert error is not None
    assert error.headers == {"x-should-retry": "false"}


def test_a_pause_ends_at_its_time() -> None:
    assert refusal(NOON, is_paused=True, pause_ends_at=NOON - timedelta(seconds=1)) is None


def test_a_new_day_begins_at_zero() -> None:
    record(NOON)
    record(NOON + timedelta(hours=1))
    assert refusal(NOON + timedelta(hours=2), usd_per_day=1) is not None
    assert refusal(NOON + timedelta(hours=12), usd_per_day=1) is None
    assert refusal(NOON + timedelta(hours=12), usd_per_month=6) is not None


def test_there_is_one_row_and_no_negative_limit() -> None:
    for fields in ({"id": 2}, {"usd_per_day": -1}, {"usd_per_month": -1}):
        with pytest.raises(IntegrityError), transaction.atomic():
            SpendLimit.objects.create(**fields)


def test_the_answer_is_kept_for_its_time(django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second, which may be over on a busy machine before it is asked again.
    assert spend.CHECK_SECONDS == 1
    monkeypatch.setattr(spend, "CHECK_SECONDS", 60.0)
    with django_assert_num_queries(1):
        assert spend.may_start_work()
        assert spend.may_start_work()
    SpendLimit.objects.create(is_paused=True)
    spend.forget_spending()
    assert not spend.may_start_work()


@pytest.mark.django_db(transaction=True)
async def test_many_requests_share_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    async def count(*arguments: Any) -> Any:
        looks.append(arguments)
        return await fetch_one(*arguments)

    monkeypatch.setattr("budgets.spend.fetch_one", count)
    await database_step(SpendLimit.objects.create, is_paused=True)
    answers = await asyncio.gather(*(spend.require_spending_async() for _ in range(50)), return_exceptions=True)
    await close_async_pool()
    assert len(looks) == 1
    assert all(isinstance(answer, ApiError) for answer in answers)
    # The sync question of the same process has its answer too.
    assert not await database_step(spend.may_start_work)


# The admin


@pytest.fixture
def operator() -> Client:
    client = Client(headers={"host": "testserver"})
    client.force_login(User.objects.create_superuser("operator", "operator@example.org"))
    return client


def test_an_operator_sets_limits_and_pauses(operator: Client) -> None:
    record(timezone.now() - timedelta(hours=1))
    record(timezone.now())
    path = "/admin/budgets/spendlimit/"
    fields = {"usd_per_day": "10", "usd_per_month": "", "is_paused": "on", "pause_ends_at_0": "", "pause_ends_at_1": ""}
    assert operator.get(f"{path}add/").status_code == 200
    assert operator.post(f"{path}add/", fields).status_code == 302
    assert not spend.may_start_work()
    page = operator.get(f"{path}1/change/").content.decode()
    assert "USD" in page
    assert operator.post(f"{path}1/change/", {**fields, "is_paused": ""}).status_code in (200, 302)
    fields.pop("is_paused")
    assert operator.post(f"{path}1/change/", fields).status_code == 302
    assert spend.may_start_work()
    assert operator.post(f"{path}add/", fields).status_code == 403
    assert operator.post(f"{path}1/delete/", {"post": "yes"}).status_code == 403
    assert "tiny" in operator.get("/admin/budgets/gputime/").content.decode()
    assert operator.get("/admin/budgets/gputime/add/").status_code == 403
