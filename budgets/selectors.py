"""What reads the money."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Final, LiteralString

from django.conf import settings
from django.db import connection
from django.utils import timezone

from accounts.models import User
from acsinfra.core.db import fetch_one
from acsinfra.core.times import iso_utc_ms
from budgets.months import month_end, month_of, month_start

# One statement, so that the figures are of one moment. Keys that were revoked show while the month has use of them.
_SUMMARY: Final[LiteralString] = """
SELECT coalesce(b.token_limit, o.monthly_tokens, %(default_limit)s::bigint), coalesce(b.used, 0), coalesce(b.held, 0),
       coalesce((SELECT json_agg(json_build_array(a.id, coalesce(a.name, ''), coalesce(a.prefix, k.prefix),
                                                  CASE WHEN k.id IS NULL THEN a.token_cap ELSE k.cap END,
                                                  coalesce(k.used, 0), coalesce(k.held, 0))
                                 ORDER BY a.id, k.id)
                   FROM (SELECT * FROM budgets_keyuse WHERE budget_id = b.id) k
                   FULL JOIN (SELECT * FROM accounts_apikey WHERE user_id = u.id) a ON a.id = k.api_key_id
                  WHERE k.id IS NOT NULL OR a.revoked_at IS NULL), '[]')
  FROM accounts_user u
  LEFT JOIN budgets_budget b ON b.user_id = u.id AND b.month = %(month)s::date
  LEFT JOIN budgets_monthlylimit o ON o.user_id = u.id
 WHERE u.id = %(user)s
"""

_UNBALANCED: Final[LiteralString] = """
SELECT 'budget ' || b.id, b.used, coalesce(l.used, 0), b.held, coalesce(h.held, 0)
  FROM budgets_budget b
  LEFT JOIN (SELECT budget_id, sum(tokens) AS used FROM budgets_ledgerentry GROUP BY 1) l ON l.budget_id = b.id
  LEFT JOIN (SELECT budget_id, sum(tokens) AS held FROM budgets_hold WHERE state = 'live' GROUP BY 1) h
         ON h.budget_id = b.id
 WHERE (%(user)s::bigint IS NULL OR b.user_id = %(user)s)
   AND (b.used <> coalesce(l.used, 0) OR b.held <> coalesce(h.held, 0))
UNION ALL
SELECT 'key use ' || k.id, k.used, coalesce(h.used, 0), k.held, coalesce(h.held, 0)
  FROM budgets_keyuse k JOIN budgets_budget b ON b.id = k.budget_id
  LEFT JOIN (SELECT hold.key_use_id, sum(l.tokens) AS used,
                    sum(hold.tokens) FILTER (WHERE hold.state = 'live') AS held
               FROM budgets_hold hold LEFT JOIN budgets_ledgerentry l ON l.hold_id = hold.id
              WHERE hold.key_use_id IS NOT NULL GROUP BY 1) h ON h.key_use_id = k.id
 WHERE (%(user)s::bigint IS NULL OR b.user_id = %(user)s)
   AND (k.used <> coalesce(h.used, 0) OR k.held <> coalesce(h.held, 0))
UNION ALL
SELECT 'hold ' || h.id, coalesce(h.charged, 0), coalesce(l.tokens, 0), 0, 0
  FROM budgets_hold h JOIN budgets_budget b ON b.id = h.budget_id
  LEFT JOIN budgets_ledgerentry l ON l.hold_id = h.id
 WHERE (%(user)s::bigint IS NULL OR b.user_id = %(user)s)
   AND (h.charged IS DISTINCT FROM l.tokens OR h.budget_id <> l.budget_id)
"""


@dataclass(frozen=True)
class KeyUsage:
    """A key's tokens of a month. `limit` is its cap; `remaining` what it can still hold, its User's Budget counted."""

    api_key_id: int | None
    name: str
    prefix: str
    limit: int | None
    used: int
    held: int
    remaining: int

    def as_json(self) -> dict[str, Any]:
        """The key's part of `GET /v1/budget`."""
        return {
            "name": self.name,
            "prefix": self.prefix,
            "limit": self.limit,
            "used": self.used,
            "held": self.held,
            "remaining": self.remaining,
        }


@dataclass(frozen=True)
class BudgetSummary:
    """A User's tokens of a month: in all, and for each key. What no key used was used in the App."""

    month: date
    limit: int
    used: int
    held: int
    keys: tuple[KeyUsage, ...]

    @property
    def remaining(self) -> int:
        """Tokens that can still be held."""
        return max(0, self.limit - self.used - self.held)

    def as_json(self, *, api_key_id: int) -> dict[str, Any]:
        """The answer of `GET /v1/budget` to the key `api_key_id`."""
        own = next((key for key in self.keys if key.api_key_id == api_key_id), None)
        return {
            "object": "budget",
            "period_start": iso_utc_ms(month_start(self.month)),
            "period_end": iso_utc_ms(month_end(self.month)),
            "limit": self.limit,
            "used": self.used,
            "held": self.held,
            "remaining": self.remaining,
            "key": own.as_json() if own else None,
            "keys": [key.as_json() for key in self.keys],
        }


@dataclass(frozen=True)
class Imbalance:
    """Figures that do not add up: what a row says is used and held, and what its ledger and live Holds say."""

    row: str
    used: int
    used_by_ledger: int
    held: int
    held_by_holds: int


def budget_summary(user: User, *, now: datetime | None = None) -> BudgetSummary:
    """The Budget of `user` this month, whether or not something was held in it yet."""
    values = _summary_values(user, now)
    with connection.cursor() as cursor:
        cursor.execute(_SUMMARY, values)
        return _summary(cursor.fetchone(), values["month"])


async def budget_summary_async(user: User, *, now: datetime | None = None) -> BudgetSummary:
    """`budget_summary` from an async view: one statement on the async pool."""
    values = _summary_values(user, now)
    return _summary(await fetch_one(_SUMMARY, values), values["month"])


def imbalances(*, user: User | None = None) -> list[Imbalance]:
    """What does not add up, of one User or of all: used against the ledger, held against the live Holds."""
    with connection.cursor() as cursor:
        cursor.execute(_UNBALANCED, {"user": None if user is None else user.pk})
        return [Imbalance(row[0], *map(int, row[1:])) for row in cursor.fetchall()]


def _summary_values(user: User, now: datetime | None) -> dict[str, Any]:
    month = month_of(now or timezone.now())
    return {"user": user.pk, "month": month, "default_limit": settings.MONTHLY_TOKENS}


def _summary(row: tuple[Any, ...] | None, month: date) -> BudgetSummary:
    if row is None:
        raise User.DoesNotExist
    limit, used, held, keys = row
    left = max(0, limit - used - held)
    return BudgetSummary(
        month=month,
        limit=limit,
        used=used,
        held=held,
        keys=tuple(
            KeyUsage(
                api_key_id=api_key_id,
                name=name,
                prefix=prefix,
                limit=cap,
                used=key_used,
                held=key_held,
                remaining=left if cap is None else max(0, min(left, cap - key_used - key_held)),
            )
            for api_key_id, name, prefix, cap, key_used, key_held in keys
        ),
    )
