"""Work that is a row: who may run it next, and that only one runs it.

A runner claims the next row by the **order of the work** (the oldest row of the User who has the fewest running) and
holds a lease that it renews. Whoever lost its lease may write nothing more. Messages only say "look": lost, doubled or
late ones change nothing.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, LiteralString

from django.contrib.auth import get_user_model
from django.db import models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from psycopg import Cursor

from acsinfra.core.db import Row, planning_once
from acsinfra.core.ids import new_uuid7

# Users who run as many as they may, counted over all Base models, and those whose turn was just found to be over.
_PASSED_OVER = """passed_over(user_id) AS MATERIALIZED (
    SELECT r.user_id FROM (SELECT user_id, count(*) AS busy FROM {table} WHERE status = '{running}' GROUP BY user_id) r
      JOIN {users} u ON u.id = r.user_id WHERE r.busy >= coalesce(u.{limit_column}, %(at_once)s)
     UNION ALL
    SELECT unnest(%(passed_over)s::bigint[])
)"""
_NOBODY_PASSED_OVER = "passed_over(user_id) AS (SELECT NULL::bigint WHERE false)"
# Statuses stand in the text, so that a plan for whatever values knows which of the partial indexes serve.
_WAITS = "base_model_id = %(model)s AND status = '{waiting}' AND (retry_at IS NULL OR retry_at <= now())"

# By the clock, not the transaction's start: it may have waited long for its turn.
_TAKE = """UPDATE {table} SET status = '{running}', lease_owner = %(owner)s, claims = claims + 1, retry_at = NULL,
       lease_expires_at = clock_timestamp() + %(lease)s, started_at = coalesce(started_at, clock_timestamp())
  FROM taken WHERE {table}.id = taken.id
RETURNING {table}.id, {table}.user_id"""
# From there on no other claim for this User is under way.
_AND_LOCK_USER = ", pg_advisory_xact_lock(hashtext('{table}.user'), hashint8({table}.user_id))"

_CLAIM_AT_FRONT = """
WITH {passed_over}, busy AS MATERIALIZED (
    SELECT DISTINCT user_id FROM {table} WHERE base_model_id = %(model)s AND status = '{running}'
), front AS (
    SELECT {age}, user_id FROM {table} WHERE {waits} AND lease_owner IS NULL ORDER BY {age} LIMIT {front}
), taken AS (
    SELECT id FROM {table} job
     WHERE status = '{waiting}'
       AND id = (SELECT id FROM front
                  WHERE user_id NOT IN (SELECT user_id FROM busy)
                    AND user_id NOT IN (SELECT user_id FROM passed_over)
                  ORDER BY {age} LIMIT 1)
       FOR UPDATE OF job SKIP LOCKED
)
{take}"""

# The recursion goes from each waiting User's oldest row to the next User's, however many rows wait.
_CLAIM = """
WITH RECURSIVE {passed_over}, next_of_users AS (
    (SELECT user_id, {age} FROM {table} WHERE {waits} ORDER BY user_id, {age} LIMIT 1)
    UNION ALL
    SELECT later.*
      FROM next_of_users
     CROSS JOIN LATERAL (SELECT user_id, {age} FROM {table} WHERE {waits} AND user_id > next_of_users.user_id
                          ORDER BY user_id, {age} LIMIT 1) later
), taken AS (
    SELECT id FROM next_of_users oldest JOIN {table} job USING ({age})
     WHERE job.status = '{waiting}' AND oldest.user_id NOT IN (SELECT user_id FROM passed_over)
     ORDER BY (SELECT count(*) FROM {table} r WHERE r.base_model_id = %(model)s AND r.status = '{running}'
                                                AND r.user_id = oldest.user_id), {age} LIMIT 1
       FOR UPDATE OF job SKIP LOCKED
)
{take}"""


@dataclass(frozen=True)
class RunningLimit:
    """How many rows of a User may run at once: what `column` of the User says, or `default` where that is null."""

    column: str
    default: int


class LeaseLostError(Exception):
    """The work was cancelled, or given to another after the lease ran out: write nothing more."""


class LeasedWork(models.Model):
    """The columns of work that is claimed: ids are UUIDv7, so that their order is the order of submitting.

    `tries` counts the claims that ended badly by the work's own doing or its runner's death; `setbacks` those that were
    given back for reasons outside (a storage that was away). A row with `retry_at` in the future is not claimed yet.
    """

    WAITING: ClassVar[str] = "pending"
    RUNNING: ClassVar[str] = "running"
    # What the oldest is first by. A long table names a column that no index but those of the claim has: PostgreSQL
    # might walk all the ended rows in the order of their ids to find the first that waits.
    AGE: ClassVar[str] = "id"
    # How many of the first that wait are looked at for a User who has none running; 0 goes to the Users at once.
    FRONT: ClassVar[int] = 0

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    claims = models.PositiveIntegerField(default=0, editable=False)
    tries = models.PositiveIntegerField(default=0, editable=False)
    setbacks = models.PositiveIntegerField(default=0, editable=False)
    lease_owner = models.UUIDField(null=True, editable=False)
    lease_expires_at = models.DateTimeField(null=True, editable=False)
    waiting_since = models.DateTimeField(db_default=Now(), editable=False)
    retry_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        abstract = True


def claim_next(
    work: type[LeasedWork], *, base_model_id: int, owner: uuid.UUID, lease: timedelta, limit: RunningLimit | None = None
) -> uuid.UUID | None:
    """Give `owner` the next waiting row of the Base model, now running with a lease: its id, or None if none may run.

    With `limit`, a User who has so many running, over all Base models, is passed over. The rows need the columns of
    LeasedWork and `user_id`, `base_model_id`, `status`, `started_at`, and an index on (base_model, status, user, *AGE);
    where `FRONT` is set, also one of the running rows, and one on (base_model, *AGE) of the waiting ones whose
    `lease_owner` is null (which all are; it keeps PostgreSQL from walking this one to find a User's oldest).
    """
    values: dict[str, Any] = {
        "model": base_model_id,
        "owner": owner,
        "lease": lease,
        "at_once": None if limit is None else limit.default,
        "passed_over": [],
    }
    while True:
        with transaction.atomic(), planning_once() as cursor:
            # One claim at a time for a Base model, so that two runners that claim at once count each other's work.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s), %s)", [work._meta.db_table, base_model_id])
            found = _take_next(cursor, work, values, limit)
            if found is None:
                return None
            pk, user_id = found
            if limit is None or _is_within(cursor, work, user_id, limit):
                return pk
            # Another Base model's runner was quicker.
            transaction.set_rollback(True)
        values["passed_over"].append(user_id)


def _take_next(
    cursor: Cursor[Row], work: type[LeasedWork], values: dict[str, Any], limit: RunningLimit | None
) -> tuple[uuid.UUID, int] | None:
    for query in claim_queries(work, limit):
        row = cursor.execute(query, values).fetchone()
        if row is not None:
            return row[0], row[1]
    return None


def claim_queries(work: type[LeasedWork], limit: RunningLimit | None) -> list[LiteralString]:
    """The statements that claim, to be tried in this order; the last decides alone where the first finds nothing."""
    names: dict[str, Any] = {
        "table": work._meta.db_table,
        "users": get_user_model()._meta.db_table,
        "age": work.AGE,
        "waiting": work.WAITING,
        "running": work.RUNNING,
        "front": work.FRONT,
        "limit_column": None if limit is None else limit.column,
    }
    parts = {"waits": _WAITS, "passed_over": _NOBODY_PASSED_OVER, "take": _TAKE}
    if limit is not None:
        parts |= {"passed_over": _PASSED_OVER, "take": _TAKE + _AND_LOCK_USER}
    names |= {part: text.format(**names) for part, text in parts.items()}
    return [query.format(**names) for query in ([_CLAIM_AT_FRONT, _CLAIM] if work.FRONT else [_CLAIM])]


def _is_within(cursor: Cursor[Row], work: type[LeasedWork], user_id: int, limit: RunningLimit) -> bool:
    """Whether the row just taken is within its User's limit, now that no other claim for that User is under way."""
    table, users = work._meta.db_table, get_user_model()._meta.db_table
    row = cursor.execute(
        f"SELECT count(*) <= coalesce((SELECT {limit.column} FROM {users} WHERE id = %s), %s) "  # noqa: S608
        f"FROM {table} WHERE status = '{work.RUNNING}' AND user_id = %s",
        [user_id, limit.default, user_id],
    ).fetchone()
    assert row is not None
    return bool(row[0])


def renew_lease(work: type[LeasedWork], *, pk: uuid.UUID, owner: uuid.UUID, lease: timedelta) -> None:
    """Move the lease's end to `lease` from now. Raises LeaseLostError."""
    if not _held(work, pk, owner).update(lease_expires_at=Now() + lease):
        raise LeaseLostError


def require_lease(work: type[LeasedWork], *, pk: uuid.UUID, owner: uuid.UUID) -> None:
    """Raise LeaseLostError unless `owner` still runs the row."""
    if not _held(work, pk, owner).exists():
        raise LeaseLostError


def lock_leased[Work: LeasedWork](work: type[Work], *, pk: uuid.UUID, owner: uuid.UUID) -> Work:
    """The row, locked until the transaction ends, in which its owner may write. Raises LeaseLostError."""
    row = _held(work, pk, owner).select_for_update(of=("self",)).first()
    if row is None:
        raise LeaseLostError
    return row


def expired[Work: LeasedWork](work: type[Work]) -> models.QuerySet[Work]:
    """Running rows whose lease ran out."""
    return work._default_manager.filter(status=work.RUNNING, lease_expires_at__lt=Now())


def each_locked[Work: models.Model](rows: models.QuerySet[Work], act: Callable[[Work], None], *, at_most: int) -> int:
    """`act` on some of `rows`, each locked in a transaction of its own; returns how many.

    Rows that others lock, or that have changed meanwhile, are left out: so two may do this at once. One transaction for
    all would hold the Budgets of several Users, and two could wait for each other.
    """
    done = 0
    # In whatever order: a sorting of so few could make PostgreSQL walk a long table by its primary key.
    for pk in list(rows.order_by().values_list("pk", flat=True)[:at_most]):
        with transaction.atomic():
            row = rows.order_by().filter(pk=pk).select_for_update(skip_locked=True, of=("self",)).first()
            if row is not None:
                act(row)
                done += 1
    return done


def put_back(row: LeasedWork, *, setback: bool = False, after: timedelta | None = None) -> None:
    """Make a locked, running row wait again, not to be claimed before `after` has passed.

    The caller counts `tries`; `setback` counts one here.
    """
    changes: dict[str, Any] = {
        "status": row.WAITING,
        "lease_owner": None,
        "lease_expires_at": None,
        "waiting_since": Now(),
        "retry_at": None if after is None else Now() + after,
        "setbacks": F("setbacks") + (1 if setback else 0),
        "tries": row.tries,
    }
    type(row)._default_manager.filter(pk=row.pk).update(**changes)


def lease_constraints(name: str, *, running: str) -> list[models.BaseConstraint]:
    """That exactly the running rows have a lease."""
    return [
        models.CheckConstraint(
            condition=Q(status=running, lease_owner__isnull=False, lease_expires_at__isnull=False)
            | (~Q(status=running) & Q(lease_owner__isnull=True, lease_expires_at__isnull=True)),
            name=f"{name}_running_has_a_lease",
        )
    ]


def _held[Work: LeasedWork](work: type[Work], pk: uuid.UUID, owner: uuid.UUID) -> models.QuerySet[Work]:
    return work._default_manager.filter(pk=pk, lease_owner=owner, status=work.RUNNING)
