"""What changes Jobs. Each function is one transaction; `jobs.running` has what a worker does with the one it runs."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone
from kombu.exceptions import OperationalError

from acsinfra.celery import app
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.leases import each_locked, expired, put_back
from acsinfra.core.renderers import render_json
from budgets.models import WorkKind
from budgets.services import SweepCount, end_orphaned_holds, release_hold, settle_hold
from harvest.models import FilesToDelete
from inference.selectors import model_not_found
from jobs.models import CompletionJob, JobRequest, JobResult
from jobs.selectors import holds_of_living_jobs

logger = structlog.get_logger(__name__)

LOOK = "jobs.look"
LOOK_SECONDS = 60
TRIES_AT_MOST = 3
SWEEP_BATCH = 200

# A Hold younger than this may belong to a claim that is not committed yet.
ORPHAN_AGE = timedelta(seconds=60)
# A result that is being written when its Job ends otherwise is whole by then, and can be deleted.
FILES_GRACE = timedelta(minutes=10)
# A worker that does not end a cancelled Job by itself within this is not waited for.
CANCEL_PATIENCE = timedelta(seconds=3)


@dataclass(frozen=True)
class Answer:
    """What a Job's result answers: a status, and the body's JSON, or the key and length of it in storage."""

    status: int
    body: bytes | None = None
    key: str = ""
    bytes: int = 0


def error_answer(job: CompletionJob, error: ApiError) -> Answer:
    """The result of a failed Job: the error object, with the Job's request id beside it."""
    body = render_json({**error.body(), "request_id": job.request_id})
    return Answer(status=error.status, body=body, bytes=len(body))


def job_failed(message: str) -> ApiError:
    """A `500 job_failed`: what failed is here, not in the request."""
    return ApiError(ErrorCode.JOB_FAILED, message)


# Telling


def tell_workers(model: str) -> None:
    """Say "look" to the workers of `model`. They look by themselves too: a broker that is away only costs seconds."""
    try:
        app.send_task(LOOK, queue=jobs_queue(model), expires=LOOK_SECONDS, retry=False)
    except OperationalError:
        logger.warning("the broker is away; workers will look by themselves", model=model)


def jobs_queue(model: str) -> str:
    """The Celery queue on which a model's inference workers hear of Jobs."""
    return f"jobs.{model}"


# Cancelling


def request_cancel(*, job_id: uuid.UUID) -> CompletionJob:
    """Cancel a Job that waits; mark one that runs, whose worker then stops and counts. An ended one stays as it is."""
    with transaction.atomic():
        job = _locked(job_id)
        if not job.is_ended and job.cancel_requested_at is None:
            job.cancel_requested_at = timezone.now()
            if job.status == CompletionJob.Status.RUNNING:
                job.save(update_fields=["cancel_requested_at"])
            else:
                end_job(job, CompletionJob.Status.CANCELLED, tokens=job.counted_tokens)
    return job


def cancel_job(*, job_id: uuid.UUID) -> CompletionJob:
    """End a Job as cancelled, at once, charged by the last count of its worker. An ended one stays as it is."""
    with transaction.atomic():
        job = _locked(job_id)
        if not job.is_ended:
            job.cancel_requested_at = job.cancel_requested_at or timezone.now()
            end_job(job, CompletionJob.Status.CANCELLED, tokens=job.counted_tokens)
    return job


def _locked(job_id: uuid.UUID) -> CompletionJob:
    return CompletionJob.objects.select_for_update(of=("self",)).get(pk=job_id)


# Ending


def end_job(
    job: CompletionJob, status: CompletionJob.Status, *, tokens: int | None, answer: Answer | None = None
) -> None:
    """Write the end of a locked Job. Every end comes through here, so that its Hold ends in the same transaction.

    `tokens` is what the engine counted; None charges nothing. One whose cancel was asked for ends as cancelled,
    whatever it came to.
    """
    if job.cancel_requested_at is not None:
        status, answer = CompletionJob.Status.CANCELLED, None
    charged = 0
    if job.hold_id is not None:
        end = release_hold(hold=job.hold_id) if tokens is None else settle_hold(hold=job.hold_id, tokens=tokens)
        charged = end.charged
    job.status, job.charged_tokens = status, charged
    job.lease_owner = job.lease_expires_at = job.retry_at = None
    job.finished_at = timezone.now()
    job.expires_at = job.finished_at + settings.JOB_RESULTS_KEPT
    job.save()
    if answer is not None:
        JobResult.objects.create(job=job, status=answer.status, body=answer.body, key=answer.key, bytes=answer.bytes)
    if job.has_files and (answer is None or not answer.key):
        # Of a run that did not bring the result; its worker may be writing still.
        let_go_of_files(job, after=FILES_GRACE)
    logger.info("job ended", job_id=str(job.pk), status=str(status), charged=charged)


def fail_job(job: CompletionJob, error: ApiError, *, tokens: int | None) -> None:
    """Write the end of a locked Job as failed with `error`."""
    end_job(job, CompletionJob.Status.FAILED, tokens=tokens, answer=error_answer(job, error))


def count_try(job: CompletionJob) -> None:
    """Count a try that died with its engine or worker: a locked Job waits again, and after 3 tries ends `failed`.

    It keeps its Hold; at its end the last count is charged.
    """
    job.tries += 1
    if job.cancel_requested_at is not None:
        end_job(job, CompletionJob.Status.CANCELLED, tokens=job.counted_tokens)
    elif job.tries >= TRIES_AT_MOST:
        message = f"The engine or its worker stopped while it ran this Job, {TRIES_AT_MOST} times."
        fail_job(job, job_failed(message), tokens=job.counted_tokens)
    else:
        put_back(job)
        transaction.on_commit(lambda: tell_workers(job.model))


def let_go_of_files(job: CompletionJob, *, after: timedelta = timedelta(0)) -> None:
    """Have the scheduler delete a Job's files in storage, in the transaction that runs now."""
    FilesToDelete.objects.get_or_create(prefix=job.storage_prefix, defaults={"not_before": timezone.now() + after})


# Sweeping


def end_expired_leases() -> int:
    """Put Jobs whose worker has gone silent back in line, or end them at their third time; returns how many."""

    def end(job: CompletionJob) -> None:
        logger.warning("job lease ran out", job_id=str(job.pk), tries=job.tries + 1)
        count_try(job)

    return each_locked(expired(CompletionJob), end, at_most=SWEEP_BATCH)


def end_forgotten_cancels() -> int:
    """End running Jobs whose cancel was asked for by an API process that died before it was done; returns how many."""
    asked_before = Now() - CANCEL_PATIENCE
    asked = CompletionJob.objects.filter(
        status=CompletionJob.Status.RUNNING, cancel_requested_at__isnull=False, cancel_requested_at__lt=asked_before
    )

    def end(job: CompletionJob) -> None:
        end_job(job, CompletionJob.Status.CANCELLED, tokens=job.counted_tokens)

    return each_locked(asked, end, at_most=SWEEP_BATCH)


def fail_jobs_of_switched_off_models() -> int:
    """Fail Jobs that wait for a model that was switched off, with `400 model_not_found`; returns how many."""
    waiting = CompletionJob.objects.filter(status=CompletionJob.Status.QUEUED, base_model__is_enabled=False)

    def end(job: CompletionJob) -> None:
        fail_job(job, model_not_found(job.model), tokens=job.counted_tokens)

    return each_locked(waiting, end, at_most=SWEEP_BATCH)


def erase_expired_results() -> int:
    """Erase requests and results whose time is over, with their files; the Jobs stay. Returns how many."""
    with transaction.atomic():
        over = CompletionJob.objects.filter(is_erased=False, expires_at__lte=Now())
        jobs = list(over.select_for_update(skip_locked=True, of=("self",)).order_by("expires_at")[:SWEEP_BATCH])
        for job in jobs:
            if job.has_files:
                let_go_of_files(job)
        _erase([job.pk for job in jobs])
    return len(jobs)


def erase_result(*, job_id: uuid.UUID) -> CompletionJob:
    """Erase what an ended Job asked for and answered, now; the Job stays, its result expired. Twice is fine.

    Raises ApiError for one that has not ended.
    """
    with transaction.atomic():
        job = _locked(job_id)
        if not job.is_ended:
            raise ApiError(ErrorCode.INVALID_REQUEST, "The Job has not ended; cancel it first.")
        if job.has_files:
            let_go_of_files(job)
        _erase([job.pk])
        job.is_erased = True
    return job


def _erase(ids: Sequence[uuid.UUID]) -> None:
    JobRequest.objects.filter(pk__in=ids).delete()
    JobResult.objects.filter(pk__in=ids).delete()
    CompletionJob.objects.filter(pk__in=ids).update(is_erased=True)


def end_orphaned_job_holds() -> SweepCount:
    """Release the Holds of Jobs that ended or are gone: of a User's whose rows an operator deleted, say."""
    return end_orphaned_holds(
        kind=WorkKind.JOB, find_living=holds_of_living_jobs, taken_before=timezone.now() - ORPHAN_AGE
    )
