"""What an operator changes: a User's monthly tokens and a key's cap. Both may fall below what is used already.

Each change locks the User's or the key's row first, as the making of a month's rows does: whichever comes second sees
the other's.
"""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from accounts.models import ApiKey, User
from budgets import statements
from budgets.models import MonthlyLimit
from budgets.months import month_of


@transaction.atomic
def set_monthly_tokens(*, user: User, monthly_tokens: int | None, now: datetime | None = None) -> None:
    """Set the tokens that `user` may spend a month, from this month on; None: as `settings.MONTHLY_TOKENS` says."""
    if monthly_tokens is not None and monthly_tokens < 0:
        raise ValueError("monthly tokens are 0 or more")
    User.objects.select_for_update(no_key=True).only("pk").get(pk=user.pk)
    if monthly_tokens is None:
        MonthlyLimit.objects.filter(user=user).delete()
    else:
        MonthlyLimit.objects.update_or_create(user=user, defaults={"monthly_tokens": monthly_tokens})
    _apply_limit(user.pk, now)


@transaction.atomic
def set_key_cap(*, api_key: ApiKey, token_cap: int | None, now: datetime | None = None) -> None:
    """Set the tokens that the key may spend a month, from this month on; None: as many as its User's Budget has."""
    if token_cap is not None and token_cap < 0:
        raise ValueError("a cap is 0 or more tokens")
    ApiKey.objects.filter(pk=api_key.pk).update(token_cap=token_cap)
    api_key.token_cap = token_cap
    apply_key_cap(api_key_id=api_key.pk, now=now)


@transaction.atomic
def apply_key_cap(*, api_key_id: int, now: datetime | None = None) -> bool:
    """Bring this month's use of the key under its `token_cap` as it is now. Says whether something changed."""
    values = _values(now) | {"api_key": api_key_id}
    with connection.cursor() as cursor:
        cursor.execute(statements.LOCK_KEY, values)
        cursor.execute(statements.APPLY_CAP, values)
        return cursor.fetchone() is not None


@transaction.atomic
def _apply_limit(user_id: int, now: datetime | None) -> bool:
    with connection.cursor() as cursor:
        values = _values(now) | {"user": user_id}
        cursor.execute(statements.LOCK_USER, values)
        cursor.execute(statements.APPLY_LIMIT, values)
        return cursor.fetchone() is not None


def apply_limits(*, now: datetime | None = None) -> int:
    """Bring this month's rows under the limits as they are now, and return how many changed. For the scheduler.

    It is what makes a changed `MONTHLY_TOKENS`, or a cap that was changed by SQL, count within the month.
    """
    with connection.cursor() as cursor:
        cursor.execute(statements.OUTDATED_LIMITS, _values(now))
        user_ids = [row[0] for row in cursor.fetchall()]
        cursor.execute(statements.OUTDATED_CAPS, _values(now))
        key_ids = [row[0] for row in cursor.fetchall()]
    changed = sum(_apply_limit(user_id, now) for user_id in user_ids)
    return changed + sum(apply_key_cap(api_key_id=key_id, now=now) for key_id in key_ids)


def _values(now: datetime | None) -> dict[str, Any]:
    return {"month": month_of(now or timezone.now()), "default_limit": settings.MONTHLY_TOKENS}
