"""Putting Jobs in line: one transaction of two statements, sent in one round trip where an async view submits."""

import functools
import uuid
from typing import Final, LiteralString

import msgspec
import psycopg
import structlog
import zstandard
from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts.models import ApiKey, User
from accounts.selectors import limit as limit_of
from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import (
    IdempotentRequest,
    bind_statement,
    bind_values,
    find_statement,
    in_progress,
    work_in,
)
from acsinfra.core.ids import new_uuid7
from acsinfra.core.shared_folder import record_storage_folder
from budgets import statements
from budgets.execution import Step, run, run_async
from budgets.services import require_room, room_values
from inference.selectors import model_not_found
from inference.wire import CompletionWork
from jobs.models import CompletionJob, JobRequest
from jobs.selectors import job_of
from jobs.services import tell_workers

logger = structlog.get_logger(__name__)

# Looks at what stood in the way of a submit and is gone by the time it is looked at.
TRIES: Final = 10

# Of two submits at once one sees the other: a statement of its own, because the next one must count by a snapshot that
# is younger than the lock.
_LOCK_USER: Final[LiteralString] = "SELECT id FROM accounts_user WHERE id = %(user)s FOR NO KEY UPDATE"
_SUBMIT: Final[tuple[LiteralString, LiteralString, LiteralString, LiteralString]] = (
    """
WITH unfinished AS (
    SELECT count(*) AS jobs FROM jobs_completionjob WHERE user_id = %(user)s AND status IN ('queued', 'running')
), admitted AS (
    SELECT FROM unfinished, (""",
    """) room WHERE jobs < %(places)s
)""",
    """, job AS (
    INSERT INTO jobs_completionjob (id, user_id, api_key_id, base_model_id, model, status, hold_tokens, created_at,
                                    claims, tries, setbacks, has_files, is_erased)
    SELECT %(id)s::uuid, %(user)s, %(api_key)s::bigint, %(base_model)s, %(model)s, 'queued', %(tokens)s::bigint,
           %(created_at)s::timestamptz, 0, 0, 0, false, false
      FROM """,
    """
    RETURNING id
), request AS (
    INSERT INTO jobs_jobrequest (job_id, work_zstd) SELECT id, %(work_zstd)s::bytea FROM job
)
SELECT jobs, EXISTS (SELECT FROM job) FROM unfinished
""",
)


def submit_job(
    *,
    user: User,
    api_key: ApiKey | None,
    base_model_id: int,
    job_id: uuid.UUID,
    work: CompletionWork,
    request: IdempotentRequest | None = None,
) -> CompletionJob:
    """Put a Job in line under the id `job_id`, or return the one that `request` made before (it has another id).

    Raises ApiError: `409 idempotency_conflict`, `429 job_capacity`, `429 budget_exceeded`, and `401` or `400
    model_not_found` where the User or the model has been deleted meanwhile.
    """
    _record_storage_folder(settings.STORAGE_URL)
    job = _new_job(user, api_key, base_model_id, job_id, work)
    try:
        bound = run(_submit(job, work, request))
    except IntegrityError:
        raise model_not_found(work.model) from None
    return _submitted(job) if bound == job.pk else job_of(user, bound)


async def submit_job_async(
    *,
    user: User,
    api_key: ApiKey | None,
    base_model_id: int,
    job_id: uuid.UUID,
    work: CompletionWork,
    request: IdempotentRequest,
) -> CompletionJob:
    """`submit_job` from an async view: hundreds a second, so one round trip and no ORM."""
    if settings.STORAGE_URL not in _recorded:
        await database_step(_record_storage_folder, settings.STORAGE_URL)
    job = _new_job(user, api_key, base_model_id, job_id, work)
    try:
        bound = await run_async(_submit(job, work, request))
    except psycopg.IntegrityError:
        raise model_not_found(work.model) from None
    return _submitted(job) if bound == job.pk else await database_step(job_of, user, bound)


def _submit(job: CompletionJob, work: CompletionWork, request: IdempotentRequest | None) -> Step[uuid.UUID]:
    """The id of the Job that is in line then: that of `job`, or of the one that `request` made before."""
    room = room_values(user=job.user, api_key=job.api_key, tokens=job.hold_tokens)
    places = limit_of(job.user, "jobs_unfinished")
    assert places is not None
    values = {
        **room,
        "id": job.pk,
        "base_model": job.base_model_id,
        "model": job.model,
        "created_at": job.created_at,
        "work_zstd": zstandard.compress(msgspec.json.encode(work), level=3),
        "places": places,
        **({} if request is None else bind_values(request, job.pk)),
    }
    submit = _submit_statement(has_key=job.api_key_id is not None, is_once=request is not None)
    for _ in range(TRIES):
        row = yield ((_LOCK_USER, values), (submit, values))
        assert row is not None
        unfinished, is_made = row
        if is_made:
            return job.pk
        # Before the limits: the first of two at once may have taken the last place for both.
        if request is not None:
            bound = work_in((yield (find_statement(request),)), request)
            if bound is not None:
                return bound
        _require_place(unfinished, places)
        yield from require_room(room)
    raise in_progress()


@functools.cache
def _submit_statement(*, has_key: bool, is_once: bool) -> LiteralString:
    """Makes the Job where there is a place and room for it, and where its Idempotency-Key is bound to it."""
    room = statements.ROOM_WITH_KEY if has_key else statements.ROOM
    head, then, job, tail = _SUBMIT
    bound = f", bound AS ({bind_statement('admitted')})" if is_once else ""
    return f"{head}{room}{then}{bound}{job}{'bound' if is_once else 'admitted'}{tail}"


def _require_place(unfinished: int, places: int) -> None:
    if unfinished >= places:
        raise ApiError(
            ErrorCode.JOB_CAPACITY,
            f"You have {places:,} unfinished Job{'' if places == 1 else 's'}, as many as you may. "
            "Wait for one to end, or cancel it.",
            headers={"Retry-After": "5"},
        )


def _new_job(
    user: User, api_key: ApiKey | None, base_model_id: int, job_id: uuid.UUID, work: CompletionWork
) -> CompletionJob:
    return CompletionJob(
        pk=job_id,
        user=user,
        api_key=api_key,
        base_model_id=base_model_id,
        model=work.model,
        hold_tokens=work.hold_tokens,
        created_at=timezone.now(),
    )


def _submitted(job: CompletionJob) -> CompletionJob:
    logger.info("job submitted", job_id=str(job.pk), model=job.model, hold_tokens=job.hold_tokens)
    return job


# Once for a process: results are kept in the folder that the API reads.
_recorded: set[str] = set()


def _record_storage_folder(url: str) -> None:
    if url not in _recorded:
        record_storage_folder()
        _recorded.add(url)


def run_again(*, job_id: uuid.UUID) -> CompletionJob:
    """Put the request of an ended Job in line once more, as a new Job of the same User and key.

    Raises ApiError: `invalid_request` for a Job that has not ended or whose request was erased, `model_not_found` for a
    model that was switched off, and what `submit_job` raises.
    """
    job = CompletionJob.objects.select_related("user", "api_key", "base_model").get(pk=job_id)
    row = JobRequest.objects.filter(job=job).first()
    if not job.is_ended:
        raise ApiError(ErrorCode.INVALID_REQUEST, "The Job has not ended.")
    if row is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Its request was erased with its result.")
    if not job.base_model.is_enabled:
        raise model_not_found(job.model)
    again = CompletionJob(pk=new_uuid7())
    work = msgspec.json.decode(zstandard.decompress(bytes(row.work_zstd)), type=CompletionWork)
    made = submit_job(
        user=job.user,
        api_key=job.api_key,
        base_model_id=job.base_model_id,
        job_id=again.pk,
        work=msgspec.structs.replace(work, request_id=again.request_id),
    )
    transaction.on_commit(lambda: tell_workers(made.model))
    return made
