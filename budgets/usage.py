"""A User's tokens of a month by day, model and key, from the settled Holds: each is one entry of the ledger."""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Final

from django.db.models import Count, Sum
from django.db.models.functions import TruncDate
from django.utils import timezone

from accounts.models import User
from budgets.models import Budget, Hold, WorkKind
from budgets.months import month_end, month_of

IN_THE_APP: Final = "App (no key)"
DELETED_KEY: Final = "deleted key"
UNNAMED_MODEL: Final = "not recorded"
# What a spreadsheet would take for a formula.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class UsageLine:
    """Tokens charged on one day (UTC) for one model, key and kind of work, and for how many pieces of work."""

    day: date
    model: str
    key_name: str
    key_prefix: str
    kind: str
    works: int
    tokens: int

    @property
    def key(self) -> str:
        """The key as pages name it."""
        return f"{self.key_name} ({self.key_prefix}…)" if self.key_prefix else self.key_name


@dataclass(frozen=True)
class Share:
    """What one model or key used, and which part of the month's tokens that is, in percent."""

    name: str
    tokens: int
    percent: float


def usage_of_month(user: User, month: date) -> list[UsageLine]:
    """The lines of `month` (its first day), by day.

    Work that ended after the month is charged to it, where its Hold was taken: such tokens count on the last day. The
    Hold, which names the key, has all that its entry in the ledger has: one statement writes both.
    """
    last_day = month_end(month).date() - timedelta(days=1)
    key = "key_use__api_key__name"
    prefix = "key_use__prefix"
    rows = (
        Hold.objects.filter(budget__user=user, budget__month=month, state=Hold.State.SETTLED)
        .annotate(day=TruncDate("ended_at"))
        .values("day", "model", key, prefix, "work_kind")
        .annotate(works=Count("pk"), sum=Sum("charged"))
        .values_list("day", "model", key, prefix, "work_kind", "works", "sum")
        .order_by("day", "model", prefix, "work_kind")
    )
    return [
        UsageLine(
            day=min(day, last_day),
            model=model or UNNAMED_MODEL,
            key_name=name or (DELETED_KEY if key_prefix else IN_THE_APP),
            key_prefix=key_prefix or "",
            kind=WorkKind(kind).label,
            works=works,
            tokens=tokens,
        )
        for day, model, name, key_prefix, kind, works, tokens in rows
    ]


def months_of(user: User, *, now: datetime | None = None) -> list[date]:
    """The months in which the User used anything, and this one; newest first."""
    used = set(Budget.objects.filter(user=user).values_list("month", flat=True))
    return sorted(used | {month_of(now or timezone.now())}, reverse=True)


def shares(lines: Iterable[UsageLine], of: Callable[[UsageLine], str]) -> list[Share]:
    """The tokens of each name that `of` gives a line, most first."""
    sums: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        sums[of(line)] += line.tokens
    total = sum(sums.values()) or 1
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return [Share(name=name, tokens=tokens, percent=round(100 * tokens / total, 1)) for name, tokens in ordered]


def usage_as_csv(lines: Iterable[UsageLine]) -> str:
    """The lines with a header. Texts that people chose are kept from being read as formulas."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["day", "model", "key_name", "key_prefix", "kind", "requests", "tokens"])
    for line in lines:
        texts = [line.model, line.key_name, line.key_prefix, line.kind]
        writer.writerow([line.day.isoformat(), *map(_as_text, texts), line.works, line.tokens])
    return out.getvalue()


def _as_text(text: str) -> str:
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA_STARTS) else text
