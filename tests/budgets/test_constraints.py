"""What the database itself refuses, whatever Python does."""

from datetime import date

import pytest
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from budgets.models import Budget, Hold, KeyUse, LedgerEntry
from budgets.services import settle_hold, take_hold
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db


@pytest.fixture
def hold() -> Hold:
    """Return a live Hold of 60 of 100 tokens, of a key with a cap of 80."""
    user = make_user(monthly_tokens=100)
    return take_hold(user=user, api_key=make_key(user, cap=80), tokens=60, work=new_work())


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"held": 101}, "budgets_budget_never_overspent"),
        ({"used": 41}, "budgets_budget_never_overspent"),
        ({"ceiling": 59, "token_limit": 59}, "budgets_budget_never_overspent"),
        ({"token_limit": 101}, "budgets_budget_ceiling_holds_the_limit"),
        ({"month": date(2026, 11, 2)}, "budgets_budget_month_is_its_first_day"),
        ({"held": -1}, "budgets_budget_held_check"),
        ({"used": -1}, "budgets_budget_used_check"),
    ],
)
def test_a_budget_keeps_its_bounds(hold: Hold, changes: dict[str, object], constraint: str) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        Budget.objects.filter(pk=hold.budget_id).update(**changes)


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"held": 81}, "budgets_keyuse_never_overspent"),
        ({"used": 21}, "budgets_keyuse_never_overspent"),
        ({"cap": 81}, "budgets_keyuse_ceiling_holds_the_cap"),
        ({"cap": None}, "budgets_keyuse_ceiling_holds_the_cap"),
        ({"ceiling": None}, "budgets_keyuse_ceiling_holds_the_cap"),
        ({"held": -1}, "budgets_keyuse_held_check"),
    ],
)
def test_the_use_of_a_key_keeps_its_bounds(hold: Hold, changes: dict[str, object], constraint: str) -> None:
    assert hold.key_use_id is not None
    with pytest.raises(IntegrityError, match=constraint):
        KeyUse.objects.filter(pk=hold.key_use_id).update(**changes)


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"state": "settled"}, "budgets_hold_legal_state"),
        ({"state": "settled", "charged": 1}, "budgets_hold_legal_state"),
        ({"state": "settled", "charged": 61, "ended_at": timezone.now()}, "budgets_hold_legal_state"),
        ({"state": "released"}, "budgets_hold_legal_state"),
        ({"state": "released", "charged": 0, "ended_at": timezone.now()}, "budgets_hold_legal_state"),
        ({"state": "paused"}, "budgets_hold_legal_state"),
        ({"ended_at": timezone.now()}, "budgets_hold_legal_state"),
        ({"charged": 0}, "budgets_hold_legal_state"),
        ({"tokens": -1}, "budgets_hold_tokens_check"),
        ({"work_kind": "other"}, "budgets_hold_names_its_work"),
        ({"work_id": ""}, "budgets_hold_names_its_work"),
        ({"work_kind": "app"}, "budgets_hold_of_the_app_has_no_key"),
    ],
)
def test_a_hold_is_in_a_legal_state(hold: Hold, changes: dict[str, object], constraint: str) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        Hold.objects.filter(pk=hold.pk).update(**changes)


def test_a_hold_is_settled_once(hold: Hold) -> None:
    settle_hold(hold=hold, tokens=1)
    with pytest.raises(IntegrityError, match="budgets_ledgerentry_pkey"):
        LedgerEntry.objects.create(
            hold=hold, budget_id=hold.budget_id, tokens=1, work_kind="job", work_id="x", charged_at=timezone.now()
        )


def test_a_work_has_one_hold_that_is_live_or_settled(hold: Hold) -> None:
    def again() -> None:
        Hold.objects.create(
            budget_id=hold.budget_id,
            tokens=1,
            work_kind=hold.work_kind,
            work_id=hold.work_id,
            taken_at=timezone.now(),
        )

    with transaction.atomic(), pytest.raises(IntegrityError, match="budgets_hold_one_a_work"), transaction.atomic():
        again()
    Hold.objects.filter(pk=hold.pk).update(state="released", ended_at=timezone.now())
    again()
    assert Hold.objects.filter(work_id=hold.work_id).count() == 2


def test_a_user_has_one_budget_a_month(hold: Hold) -> None:
    budget = Budget.objects.get(pk=hold.budget_id)
    with pytest.raises(IntegrityError, match="budgets_budget_one_a_month"):
        Budget.objects.create(user=budget.user, month=budget.month, token_limit=1, ceiling=1)


def test_the_check_stands_behind_the_services(hold: Hold) -> None:
    """Even a Budget whose figures were spoilt by hand is not overspent by a settlement."""
    Budget.objects.filter(pk=hold.budget_id).update(held=F("held") - 30)
    with pytest.raises(IntegrityError, match="budgets_budget_held_check"):
        settle_hold(hold=hold, tokens=60)
