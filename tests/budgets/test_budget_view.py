"""GET /v1/budget."""

from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import AsyncClient

from accounts.models import User
from accounts.services import create_key, revoke_key
from acsinfra.core.db import close_async_pool, database_step
from acsinfra.core.views import openapi_document
from budgets.months import month_end, month_of, month_start
from budgets.services import settle_hold, take_hold
from tests.budgets.people import make_user, new_work

pytestmark = pytest.mark.django_db(transaction=True)


def spend() -> tuple[User, str, list[str]]:
    """Make a User who spent 30 with one key and holds 20 with it, spent 5 in the App, and has two more keys."""
    user = make_user(monthly_tokens=1_000)
    capped, text = create_key(user=user, name="capped", token_cap=60)
    free, _ = create_key(user=user, name="free")
    unused_but_revoked, _ = create_key(user=user, name="gone")
    revoke_key(key=unused_but_revoked)
    settle_hold(hold=take_hold(user=user, api_key=capped, tokens=40, work=new_work()), tokens=30)
    take_hold(user=user, api_key=capped, tokens=20, work=new_work())
    settle_hold(hold=take_hold(user=user, api_key=None, tokens=5, work=new_work()), tokens=5)
    return user, text, [capped.prefix, free.prefix]


async def get(path: str, text: str, **headers: str) -> Any:
    try:
        return await AsyncClient().get(path, headers={"Authorization": f"Bearer {text}", **headers})
    finally:
        await close_async_pool()


async def test_the_budget_in_all_and_for_each_key() -> None:
    _, text, prefixes = await database_step(spend)
    answer = await get("/v1/budget", text)
    assert answer.status_code == 200
    month = month_of(datetime.now(UTC))
    capped = {"name": "capped", "prefix": prefixes[0], "limit": 60, "used": 30, "held": 20, "remaining": 10}
    free = {"name": "free", "prefix": prefixes[1], "limit": None, "used": 0, "held": 0, "remaining": 945}
    assert answer.json() == {
        "object": "budget",
        "period_start": month_start(month).isoformat(timespec="milliseconds"),
        "period_end": month_end(month).isoformat(timespec="milliseconds"),
        "limit": 1_000,
        "used": 35,
        "held": 20,
        "remaining": 945,
        "key": capped,
        "keys": [capped, free],
    }


async def test_a_budget_that_nobody_used_yet() -> None:
    def make() -> str:
        return create_key(user=make_user(), name="new")[1]

    text = await database_step(make)
    budget = (await get("/v1/budget", text)).json()
    assert (budget["limit"], budget["used"], budget["held"], budget["remaining"]) == (5_000_000, 0, 0, 5_000_000)
    assert budget["keys"] == [budget["key"]]


async def test_a_budget_needs_a_key() -> None:
    answer = await get("/v1/budget", "sk-acs-wrong")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_another_users_budget_is_not_shown() -> None:
    await database_step(spend)

    def make() -> str:
        return create_key(user=make_user(), name="other")[1]

    budget = (await get("/v1/budget", await database_step(make))).json()
    assert budget["used"] == 0
    assert [key["name"] for key in budget["keys"]] == ["other"]


def test_months_end_where_the_next_begins() -> None:
    december = month_of(datetime(2026, 12, 31, 23, 59, tzinfo=UTC))
    assert month_end(december) == datetime(2027, 1, 1, tzinfo=UTC)
    assert month_start(december) == datetime(2026, 12, 1, tzinfo=UTC)


def test_the_reference_documents_the_route() -> None:
    assert b'"/v1/budget"' in openapi_document()
