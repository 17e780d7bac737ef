"""Tokens of a month by day, model and key: on the page, and as a file that no spreadsheet runs."""

import csv
import io
from datetime import UTC, date, datetime

import pytest
from django.test import Client

from accounts.models import ApiKey, User
from acsinfra.core.plots import plot_bars, plot_line
from budgets.models import WorkKind
from budgets.services import WorkRef, settle_hold, take_hold
from budgets.usage import IN_THE_APP, shares, usage_of_month
from tests.budgets.people import make_key, make_user

pytestmark = pytest.mark.django_db

MARCH = date(2026, 3, 1)


def charge(user: User, key: ApiKey | None, tokens: int, day: datetime, model: str = "tiny") -> None:
    work = WorkRef(WorkKind.COMPLETION, f"{day}{tokens}{model}", model=model)
    hold = take_hold(user=user, api_key=key, tokens=tokens, work=work, now=datetime(2026, 3, 2, tzinfo=UTC))
    settle_hold(hold=hold, tokens=tokens, now=day)


@pytest.fixture
def user() -> User:
    user, other = make_user(), make_user()
    key, odd = make_key(user), make_key(user)
    ApiKey.objects.filter(pk=odd.pk).update(name='=HYPERLINK("//evil")')
    charge(user, key, 100, datetime(2026, 3, 2, 23, 59, tzinfo=UTC))
    charge(user, key, 20, datetime(2026, 3, 2, 1, tzinfo=UTC))
    charge(user, odd, 7, datetime(2026, 3, 3, tzinfo=UTC), model="llama-8b")
    # Ended after its month, and counted in it.
    charge(user, None, 3, datetime(2026, 4, 1, 2, tzinfo=UTC))
    charge(other, make_key(other), 55_555, datetime(2026, 3, 3, tzinfo=UTC))
    return user


def test_the_ledger_is_summed_by_day_model_and_key(user: User) -> None:
    lines = usage_of_month(user, MARCH)
    assert sorted((line.day.day, line.model, line.key_name, line.works, line.tokens) for line in lines) == [
        (2, "tiny", "tests", 2, 120),
        (3, "llama-8b", '=HYPERLINK("//evil")', 1, 7),
        (31, "tiny", IN_THE_APP, 1, 3),
    ]
    assert [(share.name, share.tokens, share.percent) for share in shares(lines, lambda line: line.model)] == [
        ("tiny", 123, 94.6),
        ("llama-8b", 7, 5.4),
    ]


def test_the_page_shows_the_month_and_only_one_s_own(client: Client, user: User) -> None:
    client.force_login(user)
    page = client.get("/app/usage?month=2026-03").content.decode()
    assert "Usage of March 2026" in page
    assert "llama-8b" in page
    assert "2 Mar: 120 (tiny)" in page
    assert "55,555" not in page
    assert "<script>" not in page
    assert client.get("/app/usage").status_code == 200
    for month in ("2026-02", "2026-3", "x", "2026-13", "２０２６-03"):
        assert client.get("/app/usage", {"month": month}).status_code == 404


def test_the_file_holds_no_formula(client: Client, user: User) -> None:
    client.force_login(user)
    answer = client.get("/app/usage.csv?month=2026-03")
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="usage-2026-03.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    assert sum(int(row["tokens"]) for row in rows) == 130
    assert [row["key_name"] for row in rows if row["model"] == "llama-8b"] == ['\'=HYPERLINK("//evil")']
    assert not any(value.startswith(("=", "+", "-", "@")) for row in rows for value in row.values())


def test_usage_is_for_people_who_signed_in(client: Client) -> None:
    for path in ("/app/usage", "/app/usage.csv"):
        assert client.get(path).headers["location"].startswith("/app/sign-in")


def test_plots_stay_inside_their_frame() -> None:
    bars = plot_bars(["a", "b"], [("x", [3, 0]), ("y", [4, 5])])
    assert [(bar.series, bar.title) for bar in bars.bars] == [(0, "a: 3 (x)"), (1, "a: 4 (y)"), (1, "b: 5 (y)")]
    assert all(bar.y >= 0 and bar.y + bar.height <= bars.bottom + 0.1 for bar in bars.bars)
    for xs, ys in (([], []), ([5], [2.0]), ([0, 3], [0.0, 0.0]), ([0, 1, 2], [1.0, 1e6, 3.0])):
        line = plot_line(xs, ys, x_name="layer")
        assert all(line.left <= point.x <= line.right and 0 <= point.y <= line.bottom for point in line.points)
