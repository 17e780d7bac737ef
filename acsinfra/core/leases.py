"""Work that is a row: who may run it next, and that only one runs it.

A runner claims the next row by the **order of the work** (the oldest row of the User who has the fewest running) and
holds a lease that it renews. Whoever lost its lease may write nothing more. Messages only say "look": lost, doubled or
late ones change nothing.
"""

import uuid
from datetime import timedelta
from typing import Any, ClassVar

from django.db import connection, models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from acsinfra.core.ids import new_uuid7

# One claim at a time for a Base model, so that two runners that claim at once count each other's work.
# {waiting} and {running} are statuses; the recursion visits each waiting User once, however many rows wait.
_CLAIM = """
WITH RECURSIVE waiting_users(user_id) AS (
    (SELECT user_id FROM {table} WHERE base_model_id = %(model)s AND status = %(waiting)s ORDER BY user_id LIMIT 1)
    UNION ALL
    SELECT (SELECT later.user_id FROM {table} later
             WHERE later.base_model_id = %(model)s AND later.status = %(waiting)s AND later.user_id > w.user_id
             ORDER BY later.user_id LIMIT 1)
      FROM waiting_users w WHERE w.user_id IS NOT NULL
), next_of_users AS (
    SELECT oldest.id, (SELECT count(*) FROM {table} r
                        WHERE r.base_model_id = %(model)s AND r.status = %(running)s AND r.user_id = w.user_id) AS busy
      FROM waiting_users w
     CROSS JOIN LATERAL (SELECT id FROM {table} j
                          WHERE j.base_model_id = %(model)s AND j.status = %(waiting)s AND j.user_id = w.user_id
                            AND (j.retry_at IS NULL OR j.retry_at <= now())
                          ORDER BY j.id LIMIT 1) oldest
), taken AS (
    SELECT job.id FROM {table} job JOIN next_of_users USING (id)
     WHERE job.status = %(waiting)s
     ORDER BY next_of_users.busy, job.id LIMIT 1
       FOR UPDATE OF job SKIP LOCKED
)
UPDATE {table} SET status = %(running)s, lease_owner = %(owner)s, lease_expires_at = now() + %(lease)s,
       claims = claims + 1, started_at = coalesce(started_at, now()), retry_at = NULL
  FROM taken WHERE {table}.id = taken.id
RETURNING {table}.id
"""


class LeaseLostError(Exception):
    """The work was cancelled, or given to another after the lease ran out: write nothing more."""


class LeasedWork(models.Model):
    """The columns of work that is claimed: ids are UUIDv7, so that their order is the order of submitting.

    `tries` counts the claims that ended badly by the work's own doing or its runner's death; `setbacks` those that were
    given back for reasons outside (a storage that was away). A row with `retry_at` in the future is not claimed yet.
    """

    WAITING: ClassVar[str] = "pending"
    RUNNING: ClassVar[str] = "running"

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
    work: type[Work], *, base_model_id: int, owner: uuid.UUID, lease: timedelta
) -> Work | None:
    """Give `owner` the next waiting row of the Base model, now running with a lease; None when none waits.

    The rows need the columns of LeasedWork and `user_id`, `base_model_id`, `status`, `started_at`, and an index on
    (base_model, status, user, id).
    """
    values: dict[str, Any] = {
        "model": base_model_id,
        "waiting": work.WAITING,
        "running": work.RUNNING,
        "owner": owner,
        "lease": lease,
    }
    table = work._meta.db_table
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s), %s)", [table, base_model_id])
        cursor.execute(_CLAIM.format(table=table), values)
        row = cursor.fetchone()
    return work._default_manager.get(pk=row[0]) if row else None


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


def lock_expired[Work: LeasedWork](work: type[Work], *, at_most: int) -> list[Work]:
    """Running rows whose lease ran out, locked until the transaction ends; rows that others lock are left out."""
    expired = work._default_manager.filter(status=work.RUNNING, lease_expires_at__lt=Now())
    return list(expired.select_for_update(skip_locked=True, of=("self",)).order_by("lease_expires_at")[:at_most])


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
