"""Holds taken, settled and released, inside the caller's transaction."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from acsinfra.core.errors import ApiError
from budgets.errors import BudgetExceeded, HoldConflict
from budgets.models import Budget, Hold, KeyUse, LedgerEntry, WorkKind
from budgets.selectors import budget_summary, imbalances
from budgets.services import MAX_TOKENS, HoldEnd, WorkRef, check_room, release_hold, settle_hold, take_hold
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db

NOVEMBER = datetime(2026, 11, 30, 23, 59, 59, 999_000, tzinfo=UTC)
DECEMBER = datetime(2026, 12, 1, tzinfo=UTC)


def test_a_hold_sets_tokens_aside_in_the_budget_and_under_the_key() -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user, cap=500)
    work = new_work()
    hold = take_hold(user=user, api_key=key, tokens=120, work=work)
    stored = Hold.objects.get(pk=hold.pk)
    assert (stored.tokens, stored.state, stored.work_kind, stored.work_id) == (120, "live", "completion", work.id)
    budget, key_use = Budget.objects.get(user=user), KeyUse.objects.get(api_key=key)
    assert (budget.token_limit, budget.used, budget.held, budget.ceiling) == (1_000, 0, 120, 1_000)
    assert (key_use.cap, key_use.used, key_use.held, key_use.ceiling) == (500, 0, 120, 500)


def test_the_hold_that_is_returned_is_the_row_that_was_written() -> None:
    user = make_user()
    expires = datetime(2030, 1, 1, tzinfo=UTC)
    hold = take_hold(user=user, api_key=make_key(user), tokens=7, work=new_work(holder="api-1"), expires_at=expires)
    stored = Hold.objects.get(pk=hold.pk)
    for field in Hold._meta.concrete_fields:
        assert getattr(hold, field.attname) == getattr(stored, field.attname), field.name


def test_a_settled_hold_charges_what_was_counted_and_lets_go_of_the_rest() -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    hold = take_hold(user=user, api_key=key, tokens=120, work=new_work())
    assert settle_hold(hold=hold, tokens=45) == HoldEnd(changed=True, state=Hold.State.SETTLED, charged=45)
    budget, key_use = Budget.objects.get(user=user), KeyUse.objects.get(api_key=key)
    assert (budget.used, budget.held) == (45, 0)
    assert (key_use.used, key_use.held) == (45, 0)
    entry = LedgerEntry.objects.get(hold=hold.pk)
    assert (entry.budget_id, entry.tokens, entry.work_kind) == (budget.pk, 45, "completion")


def test_a_charge_is_never_more_than_the_hold() -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=None, tokens=10, work=new_work())
    assert settle_hold(hold=hold, tokens=10**30).charged == 10
    assert Budget.objects.get(user=user).used == 10


def test_a_released_hold_charges_nothing() -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=None, tokens=10, work=new_work())
    assert release_hold(hold=hold.pk) == HoldEnd(changed=True, state=Hold.State.RELEASED, charged=0)
    budget = Budget.objects.get(user=user)
    assert (budget.used, budget.held) == (0, 0)
    assert not LedgerEntry.objects.filter(budget=budget).exists()


@pytest.mark.parametrize("first", ["settle", "release"])
def test_a_second_end_changes_nothing_and_says_so(first: str) -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=make_key(user), tokens=10, work=new_work())
    ended = settle_hold(hold=hold, tokens=4) if first == "settle" else release_hold(hold=hold)
    before = list(Budget.objects.filter(user=user).values()), list(Hold.objects.values()), LedgerEntry.objects.count()
    expected = HoldEnd(changed=False, state=ended.state, charged=ended.charged)
    assert settle_hold(hold=hold, tokens=9) == expected
    assert release_hold(hold=hold) == expected
    after = list(Budget.objects.filter(user=user).values()), list(Hold.objects.values()), LedgerEntry.objects.count()
    assert after == before


def test_the_end_of_a_hold_that_is_gone_says_so() -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=None, tokens=10, work=new_work())
    user.delete()
    assert settle_hold(hold=hold.pk, tokens=3) == HoldEnd(changed=False, state=None, charged=0)


def test_what_does_not_fit_the_budget_is_refused() -> None:
    user = make_user(monthly_tokens=100)
    take_hold(user=user, api_key=None, tokens=60, work=new_work(), now=NOVEMBER)
    with pytest.raises(BudgetExceeded) as refused:
        take_hold(user=user, api_key=None, tokens=41, work=new_work(), now=NOVEMBER)
    assert refused.value.status == 429
    assert refused.value.headers == {"x-should-retry": "false"}
    assert refused.value.body() == {
        "error": {
            "message": "This needs 41 tokens, and 40 of your Budget are left until the month ends, at "
            "2026-12-01T00:00:00.000+00:00.",
            "type": "rate_limit_error",
            "code": "budget_exceeded",
            "param": None,
        }
    }
    take_hold(user=user, api_key=None, tokens=40, work=new_work(), now=NOVEMBER)
    assert Budget.objects.get(user=user).held == 100


def test_what_does_not_fit_the_cap_is_refused_and_leaves_the_budget_alone() -> None:
    user = make_user(monthly_tokens=1_000)
    capped, free = make_key(user, cap=50), make_key(user)
    take_hold(user=user, api_key=capped, tokens=30, work=new_work())
    with pytest.raises(BudgetExceeded, match="20 under the cap of this API key are left"):
        take_hold(user=user, api_key=capped, tokens=21, work=new_work())
    assert Budget.objects.get(user=user).held == 30
    take_hold(user=user, api_key=free, tokens=970, work=new_work())
    with pytest.raises(BudgetExceeded, match="and 0 of your Budget are left"):
        take_hold(user=user, api_key=capped, tokens=1, work=new_work())


def test_a_first_request_over_the_limit_is_refused() -> None:
    user = make_user(monthly_tokens=100)
    with pytest.raises(BudgetExceeded, match="100 of your Budget are left"):
        take_hold(user=user, api_key=make_key(user), tokens=101, work=new_work())
    assert not Hold.objects.filter(budget__user=user).exists()


def test_a_new_month_starts_at_zero_by_itself() -> None:
    user = make_user(monthly_tokens=100)
    key = make_key(user, cap=100)
    old = take_hold(user=user, api_key=key, tokens=100, work=new_work(), now=NOVEMBER)
    with pytest.raises(BudgetExceeded):
        take_hold(user=user, api_key=key, tokens=1, work=new_work(), now=NOVEMBER)
    take_hold(user=user, api_key=key, tokens=100, work=new_work(), now=DECEMBER)
    assert budget_summary(user, now=NOVEMBER).held == 100
    settle_hold(hold=old, tokens=70, now=DECEMBER + timedelta(hours=3))
    november, december = budget_summary(user, now=NOVEMBER), budget_summary(user, now=DECEMBER)
    assert (november.used, november.held, november.keys[0].used) == (70, 0, 70)
    assert (december.used, december.held, december.keys[0].held) == (0, 100, 100)


def test_a_month_is_a_month_in_utc() -> None:
    user = make_user()
    in_sydney = datetime.fromisoformat("2026-12-01T09:00:00+11:00")
    take_hold(user=user, api_key=None, tokens=1, work=new_work(), now=in_sydney)
    assert Budget.objects.get(user=user).month.isoformat() == "2026-11-01"


def test_a_take_for_the_same_work_gives_the_hold_that_is_there() -> None:
    user = make_user(monthly_tokens=100)
    key = make_key(user)
    work = new_work(WorkKind.JOB)
    hold = take_hold(user=user, api_key=key, tokens=80, work=work, now=NOVEMBER)
    assert take_hold(user=user, api_key=key, tokens=80, work=work, now=NOVEMBER).pk == hold.pk
    assert take_hold(user=user, api_key=key, tokens=80, work=work, now=DECEMBER).pk == hold.pk
    assert budget_summary(user, now=NOVEMBER).held == 80
    assert budget_summary(user, now=DECEMBER).held == 0


def test_no_work_is_charged_twice() -> None:
    user = make_user()
    work = new_work(WorkKind.JOB)
    settle_hold(hold=take_hold(user=user, api_key=None, tokens=80, work=work), tokens=5)
    with pytest.raises(HoldConflict, match="was charged 5 tokens already"):
        take_hold(user=user, api_key=None, tokens=80, work=work)
    assert budget_summary(user).used == 5


def test_work_whose_hold_was_released_may_hold_again() -> None:
    user = make_user()
    work = new_work(WorkKind.JOB)
    first = take_hold(user=user, api_key=None, tokens=80, work=work)
    release_hold(hold=first)
    again = take_hold(user=user, api_key=None, tokens=80, work=work)
    assert again.pk != first.pk
    assert budget_summary(user).held == 80


def test_a_hold_of_other_tokens_or_another_user_is_not_the_same() -> None:
    user = make_user()
    work = new_work()
    take_hold(user=user, api_key=None, tokens=80, work=work)
    with pytest.raises(HoldConflict, match="holds 80 tokens already"):
        take_hold(user=user, api_key=None, tokens=81, work=work)
    other = make_user()
    with pytest.raises(HoldConflict):
        take_hold(user=other, api_key=None, tokens=80, work=work)
    assert budget_summary(other).held == 0


def test_ids_of_different_kinds_of_work_do_not_meet() -> None:
    user = make_user()
    for kind in WorkKind:
        take_hold(user=user, api_key=None, tokens=1, work=WorkRef(kind, "same"))
    assert budget_summary(user).held == len(WorkKind)


def test_work_of_the_app_holds_without_a_key() -> None:
    user = make_user()
    hold = take_hold(user=user, api_key=None, tokens=30, work=new_work(WorkKind.APP))
    settle_hold(hold=hold, tokens=20)
    assert LedgerEntry.objects.get(hold=hold.pk).work_kind == "app"
    assert budget_summary(user).used == 20
    with pytest.raises(ValueError, match="no key"):
        take_hold(user=user, api_key=make_key(user), tokens=30, work=new_work(WorkKind.APP))


def test_a_room_check_takes_nothing() -> None:
    user = make_user(monthly_tokens=100)
    key = make_key(user, cap=60)
    check_room(user=user, api_key=key, tokens=60)
    with pytest.raises(BudgetExceeded, match="60 under the cap"):
        check_room(user=user, api_key=key, tokens=61)
    with pytest.raises(BudgetExceeded, match="100 of your Budget"):
        check_room(user=user, api_key=None, tokens=101)
    assert budget_summary(user).held == 0
    assert not Hold.objects.filter(budget__user=user).exists()


def test_a_hold_may_be_of_no_tokens() -> None:
    user = make_user(monthly_tokens=0)
    hold = take_hold(user=user, api_key=None, tokens=0, work=new_work())
    assert settle_hold(hold=hold, tokens=0).changed
    assert LedgerEntry.objects.get(hold=hold.pk).tokens == 0


@pytest.mark.parametrize("tokens", [-1, MAX_TOKENS + 1])
def test_tokens_out_of_range_are_a_fault_of_the_caller(tokens: int) -> None:
    with pytest.raises(ValueError, match="a Hold is of"):
        take_hold(user=make_user(), api_key=None, tokens=tokens, work=new_work())


def test_a_charge_below_zero_is_a_fault_of_the_caller() -> None:
    hold = take_hold(user=make_user(), api_key=None, tokens=1, work=new_work())
    with pytest.raises(ValueError, match="0 or more"):
        settle_hold(hold=hold, tokens=-1)


def test_a_key_of_another_user_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="another User"):
        take_hold(user=make_user(), api_key=make_key(make_user()), tokens=1, work=new_work())


def test_a_key_that_was_deleted_meanwhile_is_no_key() -> None:
    user = make_user()
    key = make_key(user)
    gone = make_key(user)
    gone_id = gone.pk
    gone.delete()
    gone.pk = gone_id
    take_hold(user=user, api_key=key, tokens=1, work=new_work())
    with pytest.raises(ApiError) as refused:
        take_hold(user=user, api_key=gone, tokens=1, work=new_work())
    assert refused.value.status == 401
    assert budget_summary(user).held == 1


def test_the_use_of_a_deleted_key_stays_and_settles() -> None:
    user = make_user()
    key = make_key(user)
    prefix = key.prefix
    hold = take_hold(user=user, api_key=key, tokens=9, work=new_work())
    key.delete()
    settle_hold(hold=hold, tokens=8)
    (use,) = budget_summary(user).keys
    assert (use.api_key_id, use.prefix, use.used, use.held) == (None, prefix, 8, 0)
    assert imbalances(user=user) == []


def test_a_user_may_be_deleted_with_all_their_money() -> None:
    user = make_user(monthly_tokens=50)
    settle_hold(hold=take_hold(user=user, api_key=make_key(user), tokens=9, work=new_work()), tokens=9)
    take_hold(user=user, api_key=make_key(user), tokens=9, work=new_work())
    user.delete()
    assert not Budget.objects.filter(user_id=user.pk).exists()
    assert LedgerEntry.objects.count() == Hold.objects.count() == 0


def test_a_hold_and_its_end_belong_to_the_callers_transaction() -> None:
    user = make_user()
    kept = take_hold(user=user, api_key=None, tokens=5, work=new_work())
    with transaction.atomic():
        take_hold(user=user, api_key=None, tokens=7, work=new_work())
        settle_hold(hold=kept, tokens=5)
        transaction.set_rollback(True)
    summary = budget_summary(user)
    assert (summary.used, summary.held) == (0, 5)
    assert imbalances(user=user) == []


def test_each_step_is_one_statement() -> None:
    user = make_user()
    key = make_key(user)
    take_hold(user=user, api_key=key, tokens=5, work=new_work())
    with CaptureQueriesContext(
        connection,
    ) as taking:
        hold = take_hold(user=user, api_key=key, tokens=5, work=new_work())
    with CaptureQueriesContext(connection) as settling:
        settle_hold(hold=hold, tokens=3)
    other = take_hold(user=user, api_key=key, tokens=5, work=new_work())
    with CaptureQueriesContext(connection) as releasing:
        release_hold(hold=other)
    with CaptureQueriesContext(connection) as refusing, pytest.raises(BudgetExceeded):
        take_hold(user=user, api_key=key, tokens=MAX_TOKENS, work=new_work())
    with CaptureQueriesContext(connection) as checking:
        check_room(user=user, api_key=key, tokens=5)
    counts = [len(queries) for queries in (taking, settling, releasing, refusing, checking)]
    assert counts == [1, 1, 1, 2, 1]
