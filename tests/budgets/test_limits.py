"""What an operator changes: limits of Users and caps of keys, above and below what is used."""

from datetime import UTC, datetime
from typing import Any

import pytest

from accounts.models import ApiKey
from budgets.errors import BudgetExceeded
from budgets.limits import apply_limits, set_key_cap, set_monthly_tokens
from budgets.models import Budget, KeyUse, MonthlyLimit
from budgets.selectors import budget_summary, imbalances
from budgets.services import settle_hold, take_hold
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db

NOVEMBER = datetime(2026, 11, 20, tzinfo=UTC)
DECEMBER = datetime(2026, 12, 20, tzinfo=UTC)


def test_a_user_without_a_limit_of_their_own_has_the_settings(settings: Any) -> None:
    settings.MONTHLY_TOKENS = 70
    user = make_user()
    assert budget_summary(user).limit == 70
    take_hold(user=user, api_key=None, tokens=70, work=new_work())
    with pytest.raises(BudgetExceeded):
        take_hold(user=user, api_key=None, tokens=1, work=new_work())


def test_the_default_is_five_million(settings: Any) -> None:
    assert budget_summary(make_user()).limit == settings.MONTHLY_TOKENS == 5_000_000


def test_a_limit_below_what_is_used_breaks_nothing_and_refuses_new_work() -> None:
    user = make_user(monthly_tokens=100)
    hold = take_hold(user=user, api_key=None, tokens=40, work=new_work())
    settle_hold(hold=take_hold(user=user, api_key=None, tokens=50, work=new_work()), tokens=50)
    set_monthly_tokens(user=user, monthly_tokens=30)
    budget = Budget.objects.get(user=user)
    assert (budget.token_limit, budget.ceiling, budget.used, budget.held) == (30, 90, 50, 40)
    with pytest.raises(BudgetExceeded, match="and 0 of your Budget are left"):
        take_hold(user=user, api_key=None, tokens=1, work=new_work())
    assert settle_hold(hold=hold, tokens=40).charged == 40
    assert budget_summary(user).remaining == 0
    assert imbalances(user=user) == []


def test_a_ceiling_falls_back_to_the_limit_with_the_next_hold() -> None:
    user = make_user(monthly_tokens=100)
    hold = take_hold(user=user, api_key=None, tokens=90, work=new_work())
    set_monthly_tokens(user=user, monthly_tokens=30)
    settle_hold(hold=hold, tokens=5)
    assert Budget.objects.get(user=user).ceiling == 90
    take_hold(user=user, api_key=None, tokens=25, work=new_work())
    assert Budget.objects.get(user=user).ceiling == 30


def test_a_raised_limit_counts_at_once() -> None:
    user = make_user(monthly_tokens=10)
    take_hold(user=user, api_key=None, tokens=10, work=new_work())
    set_monthly_tokens(user=user, monthly_tokens=12)
    take_hold(user=user, api_key=None, tokens=2, work=new_work())
    assert Budget.objects.get(user=user).held == 12


def test_a_limit_taken_away_is_the_settings_again(settings: Any) -> None:
    settings.MONTHLY_TOKENS = 500
    user = make_user(monthly_tokens=10)
    take_hold(user=user, api_key=None, tokens=10, work=new_work())
    set_monthly_tokens(user=user, monthly_tokens=None)
    assert not MonthlyLimit.objects.filter(user=user).exists()
    assert budget_summary(user).limit == 500


def test_a_limit_counts_from_this_month_on_and_leaves_the_past_alone() -> None:
    user = make_user(monthly_tokens=100)
    take_hold(user=user, api_key=None, tokens=1, work=new_work(), now=NOVEMBER)
    take_hold(user=user, api_key=None, tokens=1, work=new_work(), now=DECEMBER)
    set_monthly_tokens(user=user, monthly_tokens=200, now=DECEMBER)
    assert budget_summary(user, now=NOVEMBER).limit == 100
    assert budget_summary(user, now=DECEMBER).limit == 200


def test_a_cap_may_come_and_go_and_fall_below_what_is_used() -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    hold = take_hold(user=user, api_key=key, tokens=80, work=new_work())
    set_key_cap(api_key=key, token_cap=50)
    assert list(KeyUse.objects.values_list("cap", "ceiling")) == [(50, 80)]
    with pytest.raises(BudgetExceeded, match="0 under the cap of this API key"):
        take_hold(user=user, api_key=key, tokens=1, work=new_work())
    settle_hold(hold=hold, tokens=80)
    set_key_cap(api_key=key, token_cap=None)
    assert list(KeyUse.objects.values_list("cap", "ceiling")) == [(None, None)]
    take_hold(user=user, api_key=key, tokens=920, work=new_work())
    assert ApiKey.objects.get(pk=key.pk).token_cap is None


def test_a_cap_that_is_saved_with_its_key_counts_at_once() -> None:
    user = make_user()
    key = make_key(user)
    take_hold(user=user, api_key=key, tokens=10, work=new_work())
    key.token_cap = 15
    key.save()
    with pytest.raises(BudgetExceeded, match="5 under the cap"):
        take_hold(user=user, api_key=key, tokens=6, work=new_work())


def test_the_sweep_applies_what_nobody_told_it_and_then_nothing(settings: Any) -> None:
    settings.MONTHLY_TOKENS = 500
    default, own = make_user(), make_user(monthly_tokens=50)
    key = make_key(default, cap=90)
    take_hold(user=default, api_key=key, tokens=80, work=new_work())
    take_hold(user=own, api_key=None, tokens=10, work=new_work())
    settings.MONTHLY_TOKENS = 60
    ApiKey.objects.filter(pk=key.pk).update(token_cap=85)
    assert apply_limits() == 2
    assert apply_limits() == 0
    budget = Budget.objects.get(user=default)
    assert (budget.token_limit, budget.ceiling) == (60, 80)
    assert Budget.objects.get(user=own).token_limit == 50
    assert list(KeyUse.objects.values_list("cap", "ceiling")) == [(85, 85)]


@pytest.mark.parametrize("tokens", [-1, -(10**9)])
def test_limits_below_zero_are_a_fault_of_the_caller(tokens: int) -> None:
    user = make_user()
    with pytest.raises(ValueError, match="0 or more"):
        set_monthly_tokens(user=user, monthly_tokens=tokens)
    with pytest.raises(ValueError, match="0 or more"):
        set_key_cap(api_key=make_key(user), token_cap=tokens)
