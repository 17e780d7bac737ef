"""What reads Users and keys."""

import functools
from typing import Literal, LiteralString

from django.conf import settings
from django.db.models import Model, QuerySet

from accounts.models import ApiKey, User
from acsinfra.core.db import fetch_one

type LimitName = Literal[
    "requests_at_once",
    "requests_queued",
    "requests_per_minute",
    "jobs_unfinished",
    "jobs_running",
    "harvests_unfinished",
    "harvests_per_month",
    "harvest_waits_at_once",
    "storage_quota_bytes",
]


def limit(user: User, name: LimitName) -> int | None:
    """The limit `name` of `user`: the override of an operator, else the setting of that name. None: no limit."""
    override: int | None = getattr(user, name)
    return override if override is not None else getattr(settings, name.upper())


def keys_of(user: User) -> QuerySet[ApiKey]:
    """The keys of `user`, newest first, revoked ones too."""
    return ApiKey.objects.filter(user=user)


def find_key(digest: bytes) -> ApiKey | None:
    """The key with this digest and its User, by one query; working or not."""
    return ApiKey.objects.select_related("user").filter(digest=digest).first()


async def find_key_async(digest: bytes) -> ApiKey | None:
    """`find_key` for the hot path: one statement on a connection that goes back at once, no thread, no ORM query."""
    query, n_key_columns = _key_query()
    row = await fetch_one(query, (digest,))
    if row is None:
        return None
    key = ApiKey.from_db("default", _columns(ApiKey), row[:n_key_columns])
    key.user = User.from_db("default", _columns(User), row[n_key_columns:])
    return key


@functools.cache
def _key_query() -> tuple[LiteralString, int]:
    key_columns, user_columns = _columns(ApiKey), _columns(User)
    selected = ", ".join([*(f"k.{name}" for name in key_columns), *(f"u.{name}" for name in user_columns)])
    query = f"SELECT {selected} FROM accounts_apikey k JOIN accounts_user u ON u.id = k.user_id WHERE k.digest = %s"  # noqa: S608
    return query, len(key_columns)


@functools.cache
def _columns(model: type[Model]) -> list[str]:
    """The columns that a request needs: no password's hash travels with each."""
    return [field.attname for field in model._meta.concrete_fields if field.attname not in {"password", "digest"}]
