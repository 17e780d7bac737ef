"""A process killed between its Hold and its end."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from budgets.models import Hold, WorkKind
from budgets.selectors import budget_summary, imbalances
from budgets.services import SweepCount, end_orphaned_holds, settle_hold
from tests.budgets.people import make_key, make_user, start_child

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_hold_of_a_killed_process_stays_until_a_sweep_ends_it_once() -> None:
    user = make_user(monthly_tokens=1_000)
    child = start_child("committed", make_key(user), tokens=300)
    print(file=child.stdin, flush=True)
    assert child.stdout is not None
    hold_id = json.loads(child.stdout.readline())
    child.kill()
    child.communicate()
    assert budget_summary(user).held == 300

    living = {"api-1"}
    swept = [
        end_orphaned_holds(
            kind=WorkKind.COMPLETION,
            find_living=lambda holds: {hold.pk for hold in holds if hold.holder in living},
            taken_before=timezone.now() + timedelta(seconds=1),
        )
        for _ in range(2)
    ]
    assert swept == [SweepCount(released=1), SweepCount()]
    hold = Hold.objects.get(pk=hold_id)
    assert hold.state == "released"
    # The worker that counted its tokens comes too late, and is told so.
    late = settle_hold(hold=hold, tokens=250)
    assert (late.changed, late.state) == (False, "released")
    assert budget_summary(user).remaining == 1_000
    assert imbalances() == []


def test_a_process_killed_inside_its_transaction_leaves_nothing() -> None:
    user = make_user(monthly_tokens=1_000)
    child = start_child("uncommitted", make_key(user), tokens=300)
    print(file=child.stdin, flush=True)
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.communicate()
    assert budget_summary(user).remaining == 1_000
    assert not Hold.objects.exists()
    assert imbalances() == []
