"""Many at once against one Budget, in threads, in coroutines and in several processes; and two ends of one Hold."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
from django.db import connection, transaction

from accounts.models import ApiKey, User
from acsinfra.core.db import _take_connection, close_async_pool
from budgets.errors import BudgetExceeded
from budgets.limits import set_monthly_tokens
from budgets.models import Budget, Hold, LedgerEntry
from budgets.selectors import budget_summary, imbalances
from budgets.services import (
    HoldEnd,
    release_hold,
    release_hold_async,
    settle_hold,
    settle_hold_async,
    take_hold,
    take_hold_async,
)
from tests.budgets.people import make_key, make_user, new_work, start_child

pytestmark = pytest.mark.django_db(transaction=True)

N_AT_ONCE = 64


def at_once[T](steps: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Run the steps in a thread each, all let go at the same moment, and return what came of each."""
    outcomes: list[T | Exception] = [AssertionError("did not run")] * len(steps)
    barrier = threading.Barrier(len(steps))

    def run(number: int) -> None:
        barrier.wait()
        try:
            # As the API's steps do: so many take turns at 8 connections, for as long as a busy machine needs.
            _take_connection()
            outcomes[number] = steps[number]()
        except Exception as error:  # noqa: BLE001 (it is the outcome)
            outcomes[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def take(user: User, key: ApiKey | None, tokens: int) -> Callable[[], Hold]:
    return lambda: take_hold(user=user, api_key=key, tokens=tokens, work=new_work())


def check_ten_of(outcomes: list[Hold | Exception]) -> None:
    assert sum(isinstance(outcome, Hold) for outcome in outcomes) == 10
    refusals = [outcome for outcome in outcomes if not isinstance(outcome, Hold)]
    assert {type(refusal) for refusal in refusals} == {BudgetExceeded}


def test_64_threads_against_a_budget_with_room_for_10_get_exactly_10() -> None:
    user = make_user(monthly_tokens=1_000)
    keys = [make_key(user), make_key(user), None]
    check_ten_of(at_once([take(user, keys[number % 3], 100) for number in range(N_AT_ONCE)]))
    assert budget_summary(user).remaining == 0
    assert imbalances(user=user) == []


def test_64_threads_against_a_key_with_room_for_10_get_exactly_10() -> None:
    user = make_user()
    key = make_key(user, cap=1_009)
    check_ten_of(at_once([take(user, key, 100) for _ in range(N_AT_ONCE)]))
    assert budget_summary(user).held == 1_000
    assert imbalances(user=user) == []


def test_64_coroutines_against_a_budget_with_room_for_10_get_exactly_10() -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)

    async def take_all() -> list[Hold | Exception]:
        takes = [take_hold_async(user=user, api_key=key, tokens=100, work=new_work()) for _ in range(N_AT_ONCE)]
        outcomes = await asyncio.gather(*takes, return_exceptions=True)
        await close_async_pool()
        return [outcome for outcome in outcomes if isinstance(outcome, Hold | Exception)]

    outcomes = asyncio.run(take_all())
    assert len(outcomes) == N_AT_ONCE
    check_ten_of(outcomes)


def test_four_processes_of_16_requests_against_a_budget_with_room_for_10_get_exactly_10() -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    children = [start_child(how, key, tokens=100, n_at_once=16) for how in ("async", "threads", "async", "threads")]
    taken = [hold_id for child in let_go(children) for hold_id in child]
    assert len(taken) == len(set(taken)) == 10
    assert {str(pk) for pk in Hold.objects.values_list("pk", flat=True)} == set(taken)
    assert budget_summary(user).held == 1_000
    assert imbalances() == []


def let_go(children: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Let the children, which are ready, run at the same moment, and return what each printed."""
    for child in children:
        print(file=child.stdin, flush=True)
    return [json.loads(child.communicate(timeout=240)[0]) for child in children]


def test_32_takes_of_one_work_are_one_hold() -> None:
    user = make_user(monthly_tokens=1_000)
    key, work = make_key(user), new_work()
    outcomes = at_once([lambda: take_hold(user=user, api_key=key, tokens=100, work=work) for _ in range(32)])
    (only,) = Hold.objects.all()
    assert [outcome.pk if isinstance(outcome, Hold) else outcome for outcome in outcomes] == [only.pk] * 32
    assert budget_summary(user).held == 100


def test_takes_of_one_work_that_all_saw_no_hold_are_one_hold() -> None:
    """They have looked, and wait for the Budget's lock: the first to get it makes the Hold, the others find it."""
    user = make_user(monthly_tokens=1_000)
    key, work = make_key(user), new_work()
    take(user, key, 0)()
    outcomes: list[Hold | Exception] = []
    steps: list[Callable[[], Hold | Exception]] = [lambda: take_hold(user=user, api_key=key, tokens=100, work=work)] * 4
    takes = threading.Thread(target=lambda: outcomes.extend(at_once(steps)))
    with transaction.atomic():
        Budget.objects.select_for_update().get(user=user)
        takes.start()
        while count_of_waiting() < len(steps):
            time.sleep(0.01)
    takes.join()
    only = Hold.objects.get(work_id=work.id)
    assert [outcome.pk if isinstance(outcome, Hold) else outcome for outcome in outcomes] == [only.pk] * 4
    assert budget_summary(user).held == 100


def count_of_waiting() -> int:
    """How many connections wait for another's lock."""
    with connection.cursor() as cursor:
        # Not pg_stat_activity: a transaction sees that as it was at its first look.
        cursor.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
        row = cursor.fetchone()
    return int(row[0]) if row else 0


@pytest.mark.parametrize("how", ["threads", "coroutines"])
def test_cancel_against_finish_has_one_end(how: Literal["threads", "coroutines"]) -> None:
    user = make_user(monthly_tokens=100_000)
    key = make_key(user)
    n_races = 100
    finishes = 0
    with asyncio.Runner() as loop:
        for _ in range(n_races):
            hold = take_hold(user=user, api_key=key, tokens=10, work=new_work())
            settled, released = race(hold, loop if how == "coroutines" else None)
            assert settled.changed + released.changed == 1
            assert settled.state == released.state == Hold.objects.get(pk=hold.pk).state
            finishes += settled.changed
        loop.run(close_async_pool())
    assert LedgerEntry.objects.count() == finishes
    summary = budget_summary(user)
    assert (summary.used, summary.held) == (7 * finishes, 0)
    assert imbalances() == []


def race(hold: Hold, loop: asyncio.Runner | None) -> list[HoldEnd]:
    """Settle and release the Hold at the same moment."""
    if loop is None:
        ends = at_once([lambda: settle_hold(hold=hold, tokens=7), lambda: release_hold(hold=hold)])
        assert all(isinstance(end, HoldEnd) for end in ends), ends
        return [end for end in ends if isinstance(end, HoldEnd)]

    async def both() -> list[HoldEnd]:
        return [*await asyncio.gather(settle_hold_async(hold=hold, tokens=7), release_hold_async(hold=hold))]

    return loop.run(both())


def test_a_limit_lowered_under_running_traffic_breaks_nothing() -> None:
    """Whatever the order, no Hold is taken against the old limit after the new one is in force."""
    user = make_user(monthly_tokens=10_000)
    key = make_key(user)
    take(user, key, 0)()
    stop = threading.Event()
    faults: list[Exception] = []

    def spend() -> None:
        while not stop.is_set():
            try:
                settle_hold(hold=take(user, key, 10)(), tokens=1)
            except BudgetExceeded:
                continue
            except Exception as error:  # noqa: BLE001 (the test's thread tells of it)
                faults.append(error)
                return
        connection.close()

    threads = [threading.Thread(target=spend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for limit in [5, 10_000, 0, 8_000, 20] * 4:
        set_monthly_tokens(user=user, monthly_tokens=limit)
        budget = Budget.objects.get(user=user)
        assert budget.token_limit == limit
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert imbalances() == []
    assert budget_summary(user).held == 0
