"""Work that is a row: who may run it next, and that only one runs it.

A runner claims the next row by the **order of the work** (the oldest row of the User who has the fewest running) and
holds a lease that it renews. Whoever lost its lease may write nothing more. Messages only say "look": lost, doubled or
late ones change nothing.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib.auth import get_user_model
from django.db import connection, models, transaction
from django.db.backends.utils import CursorWrapper
from django.db.models import F, Q
from django.db.models.functions import Now

from acsinfra.core.ids import new_uuid7

# Users who run as many as they may, counted over all Base models, and those whose turn was just found to be over.
_PASSED_OVER = """passed_over(user_id) AS MATERIALIZED (
    SELECT r.user_id FROM (SELECT user_id, count(*) AS busy FROM {table} WHERE status = %(running)s GROUP BY user_id) r
      JOIN {users} u ON u.id = r.user_id WHERE r.busy >= coalesce(u.{limit_column}, %(at_once)s)
     UNION ALL
    SELECT unnest(%(passed_over)s::bigint[])
)"""
_NOBODY_PASSED_OVER = "passed_over(user_id) AS (SELECT NULL::bigint WHERE false)"

# By the clock, not the transaction's start: it may have waited long for its turn.
_TAKE = """UPDATE {table} SET status = %(running)s, lease_owner = %(owner)s, claims = claims + 1, retry_at = NULL,
       lease_expires_at = clock_timestamp() + %(lease)s, started_at = coalesce(started_at, clock_timestamp())
  FROM taken WHERE {table}.id = taken.id
RETURNING {table}.id, {table}.user_id"""

# The oldest row of a User who has none running is next, if there is one: mostly it is among the first that wait, so
# that nothing needs to be known about the other Users, however many wait. NOT IN: PostgreSQL hashes it whatever it
# expects, where NOT EXISTS went through all the busy Users for each row.
_CLAIM_AT_FRONT = """
WITH {passed_over}, busy AS MATERIALIZED (
    SELECT DISTINCT user_id FROM {table} WHERE base_model_id = %(model)s AND status = %(running)s
), front AS (
    SELECT {age}, user_id FROM {table}
     WHERE base_model_id = %(model)s AND status = %(waiting)s AND lease_owner IS NULL
       AND (retry_at IS NULL OR retry_at <= now())
     ORDER BY {age} LIMIT %(front)s
), taken AS (
    SELECT id FROM {table} job
     WHERE status = %(waiting)s
       AND id = (SELECT id FROM front
                  WHERE user_id NOT IN (SELECT user_id FROM busy)
                    AND user_id NOT IN (SELECT user_id FROM passed_over)
                  ORDER BY {age} LIMIT 1)
       FOR UPDATE OF job SKIP LOCKED
)
{take}"""

# {waiting} and {running} are statuses; the recursion visits each waiting User once, however many rows wait.
_CLAIM = """
WITH RECURSIVE {passed_over}, waiting_users(user_id) AS (
    (SELECT user_id FROM {table} WHERE base_model_id = %(model)s AND status = %(waiting)s ORDER BY user_id LIMIT 1)
    UNION ALL
    SELECT (SELECT later.user_id FROM {table} later
             WHERE later.base_model_id = %(model)s AND later.status = %(waiting)s AND later.user_id > w.user_id
             ORDER BY later.user_id LIMIT 1)
      FROM waiting_users w WHERE w.user_id IS NOT NULL
), next_of_users AS (
    SELECT oldest.*, (SELECT count(*) FROM {table} r
                        WHERE r.base_model_id = %(model)s AND r.status = %(running)s AND r.user_id = w.user_id) AS busy
      FROM waiting_users w
     CROSS JOIN LATERAL (SELECT {age} FROM {table} j
                          WHERE j.base_model_id = %(model)s AND j.status = %(waiting)s AND j.user_id = w.user_id
                            AND (j.retry_at IS NULL OR j.retry_at <= now())
                          ORDER BY {age} LIMIT 1) oldest
     WHERE w.user_id IS NOT NULL AND NOT EXISTS (SELECT FROM passed_over p WHERE p.user_id = w.user_id)
), taken AS (
    SELECT job.id FROM {table} job JOIN next_of_users USING ({age})
     WHERE job.status = %(waiting)s
     ORDER BY busy, {age} LIMIT 1
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


def claim_next[Work: LeasedWork](
    work: type[Work], *, base_model_id: int, owner: uuid.UUID, lease: timedelta, limit: RunningLimit | None = None
) -> Work | None:
    """Give `owner` the next waiting row of the Base model, now running with a lease; None when none may run now.

    With `limit`, a User who has so many running, over all Base models, is passed over. The rows need the columns of
    LeasedWork and `user_id`, `base_model_id`, `status`, `started_at`, and an index on (base_model, status, user, *AGE);
    where `FRONT` is set, also one of the running rows, and one on (base_model, *AGE) of the waiting ones whose
    `lease_owner` is null (which all are; it keeps PostgreSQL from walking this one to find a User's oldest).
    """
    table = work._meta.db_table
    values: dict[str, Any] = {
        "model": base_model_id,
        "waiting": work.WAITING,
        "running": work.RUNNING,
        "owner": owner,
        "lease": lease,
        "front": work.FRONT,
        "at_once": None if limit is None else limit.default,
        "passed_over": [],
    }
    with transaction.atomic(), connection.cursor() as cursor:
        # One claim at a time for a Base model, so that two runners that claim at once count each other's work.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s), %s)", [table, base_model_id])
        while True:
            with transaction.atomic():
                found = _take_next(cursor, work, values, limit)
                if found is None:
                    return None
                pk, user_id = found
                if limit is None or _is_within(cursor, work, user_id, limit):
                    break
                # Another Base model's runner was quicker.
                transaction.set_rollback(True)
            values["passed_over"].append(user_id)
    return work._default_manager.get(pk=pk)


def _take_next(
    cursor: CursorWrapper, work: type[LeasedWork], values: dict[str, Any], limit: RunningLimit | None
) -> tuple[uuid.UUID, int] | None:
    for query in claim_queries(work, limit):
        cursor.execute(query, values)
        row: tuple[uuid.UUID, int] | None = cursor.fetchone()
        if row is not None:
            return row
    return None


def claim_queries(work: type[LeasedWork], limit: RunningLimit | None) -> list[str]:
    """The statements that claim, to be tried in this order; the last decides alone where the first finds nothing."""
    table, users = work._meta.db_table, get_user_model()._meta.db_table
    passed_over = _NOBODY_PASSED_OVER
    if limit is not None:
        passed_over = _PASSED_OVER.format(table=table, users=users, limit_column=limit.column)
    queries = [_CLAIM_AT_FRONT, _CLAIM] if work.FRONT else [_CLAIM]
    take = _TAKE.format(table=table)
    return [query.format(table=table, age=work.AGE, passed_over=passed_over, take=take) for query in queries]


def _is_within(cursor: CursorWrapper, work: type[LeasedWork], user_id: int, limit: RunningLimit) -> bool:
    """Whether the row just taken is within its User's limit, once no other claim for that User is under way."""
    table, users = work._meta.db_table, get_user_model()._meta.db_table
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s), %s)", [f"{table}.user", user_id])
    cursor.execute(
        f"SELECT count(*) <= coalesce((SELECT {limit.column} FROM {users} WHERE id = %s), %s) "  # noqa: S608
        f"FROM {table} WHERE status = %s AND user_id = %s",
        [user_id, limit.default, work.RUNNING, user_id],
    )
    return bool(cursor.fetchone()[0])


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
