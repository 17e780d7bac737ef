"""The money in the admin: limits are set there, all else is only read."""

from datetime import datetime
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from accounts.models import User
from budgets.errors import BudgetExceeded
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


@pytest.mark.parametrize("page", ["budget", "hold", "ledgerentry"])
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


def test_a_limit_that_is_set_changed_and_taken_away_on_the_user_s_page_counts_at_once(operator: Client) -> None:
    user = make_user()
    take_hold(user=user, api_key=None, tokens=100, work=new_work())
    for given, limit, left in (("150", 150, 50), ("40", 40, 0), ("", 5_000_000, 4_999_900)):
        page = operator.get(f"/admin/accounts/user/{user.pk}/change/")
        answer = operator.post(page.request["PATH_INFO"], filled(page) | {"monthly_tokens": given})
        assert answer.status_code == 302
        budget = budget_summary(user)
        assert (budget.limit, budget.remaining) == (limit, left)
    said = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert said == [
        "Monthly tokens: empty → 150.",
        "Monthly tokens: 150 → 40.",
        "Monthly tokens: 40 → empty.",
    ]
    assert not MonthlyLimit.objects.exists()


def test_a_user_s_page_shows_budget_limits_keys_and_the_way_to_their_work(operator: Client) -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    settle_hold(hold=take_hold(user=user, api_key=key, tokens=77, work=new_work()), tokens=66)
    page = operator.get(f"/admin/accounts/user/{user.pk}/change/").content.decode()
    assert "66 used, 0 held, 934 left of 1,000 tokens" in page
    assert f"/admin/budgets/ledgerentry/?q={user.username}" in page
    assert key.prefix in page
    assert 'placeholder="16"' in page


def test_a_key_s_cap_counts_at_once(operator: Client) -> None:
    user = make_user(monthly_tokens=1_000)
    key = make_key(user)
    take_hold(user=user, api_key=key, tokens=50, work=new_work())
    form = {"name": key.name, "token_cap": "60", "expires_at_0": "", "expires_at_1": ""}
    assert operator.post(f"/admin/accounts/apikey/{key.pk}/change/", form).status_code == 302
    with pytest.raises(BudgetExceeded):
        take_hold(user=user, api_key=key, tokens=11, work=new_work())


def test_holds_and_charges_are_found_by_their_work_and_their_user(operator: Client, hold: Hold) -> None:
    for term, n_holds, n_charges in (
        (hold.budget.user.username, 2, 1),
        (hold.work_id, 1, 0),
        (str(hold.pk), 1, 0),
        ("nobody", 0, 0),
    ):
        found = [
            operator.get(f"/admin/budgets/{page}/", {"q": term}).context["cl"].result_count
            for page in ("hold", "ledgerentry")
        ]
        assert found == [n_holds, n_charges], term


def filled(page: Any) -> dict[str, Any]:
    """Return what a browser would send of a change page's form as it stands."""
    form = page.context["adminform"].form
    values: dict[str, Any] = {}
    for name in form.fields:
        value = form.get_initial_for_field(form.fields[name], name)
        if isinstance(value, datetime):
            values |= {f"{name}_0": f"{value:%Y-%m-%d}", f"{name}_1": f"{value:%H:%M:%S}"}
        elif value is not None and value is not False and name != "password":
            values[name] = value
    for formset in page.context["inline_admin_formsets"]:
        values |= {field.html_name: field.value() for field in formset.formset.management_form}
    return values


@pytest.mark.parametrize("user", ["ada", "1e400", "9" * 30, "٣"])
def test_a_key_of_a_user_that_is_none_is_refused_on_its_form(operator: Client, user: str) -> None:
    answer = operator.post("/admin/accounts/apikey/add/", {"user": user, "name": "laptop"})
    assert answer.status_code == 200
    assert "Select a valid choice" in answer.content.decode()
