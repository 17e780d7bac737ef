"""The money in the admin: limits are set there, all else is only read."""

import pytest
from django.test import Client

from accounts.models import User
from budgets.models import Budget, Hold, LedgerEntry, MonthlyLimit
from budgets.selectors import budget_summary
from budgets.services import settle_hold, take_hold
from tests.budgets.people import make_key, make_user, new_work

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator() -> Client:
    client = Client(headers={"host": "testserver"})
    client.force_login(User.objects.create_superuser("operator", "operator@example.org"))
    return client


@pytest.fixture
def hold() -> Hold:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    settle_hold(hold=take_hold(user=user, api_key=key, tokens=77, work=new_work()), tokens=66)
    return take_hold(user=user, api_key=key, tokens=55, work=new_work())


@pytest.mark.parametrize("page", ["budget", "hold", "ledgerentry", "monthlylimit"])
def test_the_lists_show(operator: Client, hold: Hold, page: str) -> None:
    answer = operator.get(f"/admin/budgets/{page}/")
    assert answer.status_code == 200
    assert hold.budget.user.username in answer.content.decode()


@pytest.mark.parametrize("page", ["budget", "hold", "ledgerentry"])
def test_money_cannot_be_made_changed_or_deleted_by_hand(operator: Client, hold: Hold, page: str) -> None:
    row = {
        "budget": hold.budget_id,
        "hold": hold.pk,
        "ledgerentry": LedgerEntry.objects.get().pk,
    }[page]
    assert operator.get(f"/admin/budgets/{page}/add/").status_code == 403
    assert operator.get(f"/admin/budgets/{page}/{row}/change/").status_code == 200
    assert operator.post(f"/admin/budgets/{page}/{row}/change/", {"tokens": 1, "used": 1}).status_code == 403
    assert operator.post(f"/admin/budgets/{page}/{row}/delete/", {"post": "yes"}).status_code == 403
    budget = Budget.objects.get()
    assert (budget.used, budget.held, Hold.objects.count(), LedgerEntry.objects.count()) == (66, 55, 2, 1)


def test_the_ledger_says_app_for_work_without_a_key(operator: Client) -> None:
    settle_hold(hold=take_hold(user=make_user(), api_key=None, tokens=5, work=new_work()), tokens=5)
    page = operator.get("/admin/budgets/ledgerentry/").content.decode()
    assert '<td class="field-key">app</td>' in page


def test_a_limit_that_is_set_changed_and_taken_away_counts_at_once(operator: Client) -> None:
    user = make_user()
    take_hold(user=user, api_key=None, tokens=100, work=new_work())
    add = operator.post("/admin/budgets/monthlylimit/add/", {"user": user.pk, "monthly_tokens": 150})
    assert add.status_code == 302
    assert (budget_summary(user).limit, budget_summary(user).remaining) == (150, 50)
    operator.post(f"/admin/budgets/monthlylimit/{user.pk}/change/", {"monthly_tokens": 40})
    assert (budget_summary(user).limit, budget_summary(user).remaining) == (40, 0)
    operator.post(f"/admin/budgets/monthlylimit/{user.pk}/delete/", {"post": "yes"})
    assert not MonthlyLimit.objects.exists()
    assert budget_summary(user).limit == 5_000_000


def test_limits_are_deleted_by_the_lists_action_too(operator: Client) -> None:
    user = make_user(monthly_tokens=150)
    take_hold(user=user, api_key=None, tokens=100, work=new_work())
    operator.post(
        "/admin/budgets/monthlylimit/",
        {"action": "delete_selected", "_selected_action": [user.pk], "post": "yes"},
    )
    assert budget_summary(user).limit == 5_000_000
