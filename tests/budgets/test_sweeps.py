"""Holds whose work no longer exists, ended by a sweep."""

import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from uuid import UUID

import pytest
from django.db import connection
from django.utils import timezone

from budgets.models import Hold, WorkKind
from budgets.selectors import budget_summary, imbalances
from budgets.services import (
    SWEEP_BATCH,
    SweepCount,
    end_expired_holds,
    end_orphaned_holds,
    settle_hold,
    take_hold,
)
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db

SOON = timedelta(seconds=5)


def none_lives(holds: Sequence[Hold]) -> Collection[UUID]:
    return ()


def test_a_sweep_ends_what_does_not_live_and_leaves_the_rest() -> None:
    user = make_user()
    key = make_key(user)
    orphan = take_hold(user=user, api_key=key, tokens=10, work=new_work(holder="api-dead"))
    alive = take_hold(user=user, api_key=key, tokens=20, work=new_work(holder="api-1"))
    job = take_hold(user=user, api_key=key, tokens=40, work=new_work(WorkKind.JOB, holder="api-dead"))
    asked: list[tuple[str, str]] = []

    def find_living(holds: Sequence[Hold]) -> Collection[UUID]:
        asked.extend((hold.work_kind, hold.holder) for hold in holds)
        return [hold.pk for hold in holds if hold.holder == "api-1"]

    count = end_orphaned_holds(kind=WorkKind.COMPLETION, find_living=find_living, taken_before=timezone.now() + SOON)
    assert count == SweepCount(released=1)
    assert asked == [("completion", "api-dead"), ("completion", "api-1")]
    states = dict(Hold.objects.values_list("pk", "state"))
    assert states == {orphan.pk: "released", alive.pk: "live", job.pk: "live"}
    assert budget_summary(user).held == 60


def test_an_orphan_is_charged_what_was_counted_last() -> None:
    user = make_user()
    counted = take_hold(user=user, api_key=None, tokens=10, work=new_work())
    take_hold(user=user, api_key=None, tokens=20, work=new_work())
    last_counts = {counted.work_id: 6}
    count = end_orphaned_holds(
        kind=WorkKind.COMPLETION,
        find_living=none_lives,
        taken_before=timezone.now() + SOON,
        count=lambda hold: last_counts.get(hold.work_id),
    )
    assert count == SweepCount(settled=1, released=1, tokens=6)
    assert (budget_summary(user).used, budget_summary(user).held) == (6, 0)


def test_a_young_hold_is_left_alone() -> None:
    """Its work may not be written yet."""
    now = timezone.now()
    user = make_user()
    take_hold(user=user, api_key=None, tokens=1, work=new_work(WorkKind.JOB), now=now)
    sweep = {"kind": WorkKind.JOB, "find_living": none_lives}
    assert end_orphaned_holds(**sweep, taken_before=now) == SweepCount()  # type: ignore[arg-type]
    assert end_orphaned_holds(**sweep, taken_before=now + SOON) == SweepCount(released=1)  # type: ignore[arg-type]


def test_a_sweep_goes_through_more_holds_than_a_batch() -> None:
    user = make_user()
    n_holds = SWEEP_BATCH + 3
    holds = [take_hold(user=user, api_key=None, tokens=1, work=new_work()) for _ in range(n_holds)]
    living = {hold.pk for hold in holds[:SWEEP_BATCH]}
    batches: list[int] = []

    def find_living(batch: Sequence[Hold]) -> Collection[UUID]:
        batches.append(len(batch))
        return living

    count = end_orphaned_holds(kind=WorkKind.COMPLETION, find_living=find_living, taken_before=timezone.now() + SOON)
    assert (count.released, batches) == (3, [SWEEP_BATCH, 3])
    assert budget_summary(user).held == SWEEP_BATCH


def test_holds_of_the_kinds_asked_for_that_expired_are_ended() -> None:
    now = timezone.now()
    user = make_user()
    take_hold(user=user, api_key=None, tokens=1, work=new_work(), expires_at=now - SOON)
    take_hold(user=user, api_key=None, tokens=2, work=new_work(WorkKind.APP), expires_at=now - SOON)
    take_hold(user=user, api_key=None, tokens=4, work=new_work(), expires_at=now + SOON)
    take_hold(user=user, api_key=None, tokens=8, work=new_work(WorkKind.JOB))
    assert end_expired_holds(kinds=(WorkKind.JOB, WorkKind.HARVEST), now=now) == SweepCount()
    assert end_expired_holds(kinds=WorkKind, now=now) == SweepCount(released=2)
    assert end_expired_holds(kinds=WorkKind, now=now) == SweepCount()
    assert budget_summary(user).held == 12


def test_an_expired_hold_may_be_charged_too() -> None:
    user = make_user()
    take_hold(user=user, api_key=None, tokens=9, work=new_work(), expires_at=timezone.now() - SOON)
    assert end_expired_holds(kinds=WorkKind, count=lambda hold: hold.tokens) == SweepCount(settled=1, tokens=9)
    assert budget_summary(user).used == 9


@pytest.mark.django_db(transaction=True)
def test_two_sweeps_at_once_end_each_hold_once() -> None:
    user = make_user()
    key = make_key(user)
    for _ in range(40):
        take_hold(user=user, api_key=key, tokens=10, work=new_work())
    barrier = threading.Barrier(2)
    counts: list[SweepCount] = []

    def find_living(holds: Sequence[Hold]) -> Collection[UUID]:
        barrier.wait()  # both have read the same live Holds
        return ()

    def sweep() -> None:
        counts.append(
            end_orphaned_holds(
                kind=WorkKind.COMPLETION,
                find_living=find_living,
                taken_before=timezone.now() + SOON,
                count=lambda hold: 3,
            )
        )
        connection.close()

    threads = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 2
    assert sum(count.settled for count in counts) == 40
    assert sum(count.tokens for count in counts) == 120
    assert (budget_summary(user).used, budget_summary(user).held) == (120, 0)
    assert imbalances() == []


def test_a_finish_between_the_look_and_the_end_wins() -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=None, tokens=10, work=new_work())

    def finish_meanwhile(holds: Sequence[Hold]) -> Collection[UUID]:
        settle_hold(hold=hold, tokens=8)
        return ()

    count = end_orphaned_holds(
        kind=WorkKind.COMPLETION, find_living=finish_meanwhile, taken_before=timezone.now() + SOON
    )
    assert count == SweepCount()
    assert budget_summary(user).used == 8
