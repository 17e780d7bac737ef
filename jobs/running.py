"""What a worker does with the Jobs that it runs: claims one with its Hold, keeps its lease, writes its end.

Each function is one transaction. Whoever lost its lease writes nothing more: LeaseLostError.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import structlog
import zstandard
from django.conf import settings
from django.db import connection, transaction

from accounts.models import ApiKey, User
from acsinfra.core.db import planning_once
from acsinfra.core.errors import ApiError
from acsinfra.core.leases import LeaseLostError, RunningLimit, claim_next, lock_leased, put_back
from budgets.errors import BudgetExceeded, HoldConflict
from budgets.models import WorkKind
from budgets.services import WorkRef, take_hold
from budgets.spend import may_start_work
from inference.selectors import model_not_found
from inference.wire import CompletionWork
from jobs.models import CompletionJob
from jobs.services import Answer, count_try, end_job, fail_job, job_failed, tell_workers

logger = structlog.get_logger(__name__)

_READ = """
SELECT j.id, j.user_id, j.api_key_id, j.model, j.hold_tokens, j.hold_id, j.claims, j.tries, m.is_enabled, r.work_zstd
  FROM jobs_completionjob j
  JOIN inference_basemodel m ON m.id = j.base_model_id
  JOIN jobs_jobrequest r ON r.job_id = j.id
 WHERE j.id = %s
"""
# One statement for all that a worker runs. A row that does not come back is its worker's no more.
_LOOK = """
SELECT j.id, j.cancel_requested_at IS NOT NULL
  FROM jobs_completionjob j JOIN unnest(%(ids)s::uuid[], %(owners)s::uuid[]) AS mine(id, owner)
    ON j.id = mine.id AND j.lease_owner = mine.owner
 WHERE j.status = 'running'
"""
_RENEW = """
UPDATE jobs_completionjob j
   SET lease_expires_at = now() + %(lease)s, counted_tokens = coalesce(mine.tokens, j.counted_tokens)
  FROM unnest(%(ids)s::uuid[], %(owners)s::uuid[], %(tokens)s::bigint[]) AS mine(id, owner, tokens)
 WHERE j.id = mine.id AND j.lease_owner = mine.owner AND j.status = 'running'
RETURNING j.id, j.cancel_requested_at IS NOT NULL
"""


@dataclass(frozen=True)
class ClaimedJob:
    """A Job that `owner` runs: its id, its claim's number (from 1), the tries that died, and what it asks for."""

    id: uuid.UUID
    owner: uuid.UUID
    claims: int
    tries: int
    request_id: str
    storage_prefix: str
    work: CompletionWork


class _ClaimedRow(NamedTuple):
    """What is read of a Job that was just claimed."""

    id: uuid.UUID
    user_id: int
    api_key_id: int | None
    model: str
    hold_tokens: int
    hold_id: uuid.UUID | None
    claims: int
    tries: int
    is_enabled: bool
    work_zstd: bytes


@dataclass(frozen=True)
class Count:
    """What a worker has counted of a Job until now; `tokens` is None before the engine has it."""

    id: uuid.UUID
    owner: uuid.UUID
    tokens: int | None


def claim_job(*, base_model_id: int, owner: uuid.UUID) -> ClaimedJob | None:
    """Give `owner` the next Job of the Base model with its Hold, in one transaction; None when none may run now.

    A Job on the way that has no room in the Budget any more ends failed, with `429 budget_exceeded`. Under a Spend
    limit that is reached, or a pause, Jobs wait.
    """
    if not may_start_work():
        return None
    limit = RunningLimit(column="jobs_running", default=settings.JOBS_RUNNING)
    while True:
        with transaction.atomic():
            job_id = claim_next(
                CompletionJob, base_model_id=base_model_id, owner=owner, lease=settings.LEASE, limit=limit
            )
            if job_id is None:
                return None
            row = _read(job_id)
            if _may_run(row):
                job = CompletionJob(pk=job_id)
                return ClaimedJob(
                    id=job_id,
                    owner=owner,
                    claims=row.claims,
                    tries=row.tries,
                    request_id=job.request_id,
                    storage_prefix=job.storage_prefix,
                    work=msgspec.json.decode(zstandard.decompress(row.work_zstd), type=CompletionWork),
                )


def _read(job_id: uuid.UUID) -> _ClaimedRow:
    with planning_once() as cursor:
        row = cursor.execute(_READ, [job_id]).fetchone()
    assert row is not None
    return _ClaimedRow(*row)


def _may_run(row: _ClaimedRow) -> bool:
    """Take the Hold of a Job that was just claimed, or end it."""
    if not row.is_enabled:
        job = CompletionJob.objects.get(pk=row.id)
        fail_job(job, model_not_found(job.model), tokens=job.counted_tokens)
        return False
    if row.hold_id is not None:
        return True
    try:
        hold = take_hold(
            # Who pays, by id: nothing else of them is looked at.
            user=User(pk=row.user_id),
            api_key=None if row.api_key_id is None else ApiKey(pk=row.api_key_id, user_id=row.user_id),
            tokens=row.hold_tokens,
            work=WorkRef(kind=WorkKind.JOB, id=str(row.id), model=row.model),
        )
    except BudgetExceeded as error:
        fail_job(CompletionJob.objects.get(pk=row.id), error, tokens=None)
        return False
    except HoldConflict:
        logger.exception("a job that never ran has a hold already", job_id=str(row.id))
        failure = job_failed("The tokens of this Job could not be held.")
        fail_job(CompletionJob.objects.get(pk=row.id), failure, tokens=None)
        return False
    CompletionJob.objects.filter(pk=row.id).update(hold_id=hold.pk)
    return True


def look_after_jobs(counts: Iterable[Count], *, renew: bool) -> Mapping[uuid.UUID, bool]:
    """Which of these Jobs their owners still run, and whether a cancel was asked for.

    With `renew` their leases are renewed and their counts stored.
    """
    counts = list(counts)
    values: dict[str, Any] = {
        "ids": [count.id for count in counts],
        "owners": [count.owner for count in counts],
        "tokens": [count.tokens for count in counts],
        "lease": settings.LEASE,
    }
    with connection.cursor() as cursor:
        cursor.execute(_RENEW if renew else _LOOK, values)
        return dict(cursor.fetchall())


def note_files(*, job_id: uuid.UUID, owner: uuid.UUID) -> None:
    """Note that the Job is about to have files in storage, so that they go when it does."""
    if not CompletionJob.objects.filter(pk=job_id, lease_owner=owner).update(has_files=True):
        raise LeaseLostError


def finish_job(*, job_id: uuid.UUID, owner: uuid.UUID, tokens: int, answer: Answer) -> CompletionJob:
    """End a Job as succeeded with `answer`, whose files are whole in storage by now."""
    with transaction.atomic():
        job = lock_leased(CompletionJob, pk=job_id, owner=owner)
        end_job(job, CompletionJob.Status.SUCCEEDED, tokens=tokens, answer=answer)
    return job


def fail_running_job(*, job_id: uuid.UUID, owner: uuid.UUID, tokens: int | None, error: ApiError) -> CompletionJob:
    """End a Job as failed with `error`."""
    with transaction.atomic():
        job = lock_leased(CompletionJob, pk=job_id, owner=owner)
        fail_job(job, error, tokens=tokens)
    return job


def fail_try(*, job_id: uuid.UUID, owner: uuid.UUID, tokens: int | None) -> CompletionJob:
    """Put a Job whose engine died back in line, or end it at its third time."""
    with transaction.atomic():
        job = _counted(job_id, owner, tokens)
        count_try(job)
    return job


def hand_back(*, job_id: uuid.UUID, owner: uuid.UUID, tokens: int | None) -> CompletionJob:
    """Put a Job back in line, as its worker stops; one whose cancel was asked for ends."""
    with transaction.atomic():
        job = _counted(job_id, owner, tokens)
        if job.cancel_requested_at is not None:
            end_job(job, CompletionJob.Status.CANCELLED, tokens=job.counted_tokens)
        else:
            put_back(job)
            transaction.on_commit(lambda: tell_workers(job.model))
    return job


def _counted(job_id: uuid.UUID, owner: uuid.UUID, tokens: int | None) -> CompletionJob:
    job = lock_leased(CompletionJob, pk=job_id, owner=owner)
    if tokens is not None:
        job.counted_tokens = tokens
        job.save(update_fields=["counted_tokens"])
    return job
