"""What changes Harvest jobs. Each function is one transaction."""

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
import zstandard
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone
from kombu.exceptions import OperationalError

from accounts.models import ApiKey, User
from acsinfra.celery import app
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import IdempotentRequest, bind_work, free_work
from acsinfra.core.ids import new_uuid7
from acsinfra.core.leases import LeaseLostError, each_locked, expired, lock_leased, put_back
from acsinfra.core.shared_folder import record_storage_folder
from acsinfra.core.storage import StoredObject, get_storage
from budgets.models import Hold, WorkKind
from budgets.services import (
    SweepCount,
    WorkRef,
    check_room,
    end_orphaned_holds,
    release_hold,
    settle_hold,
    take_hold,
)
from budgets.spend import may_start_work
from harvest.limits import UNFINISHED, lock_payers, require_monthly_count, require_place, require_storage
from harvest.models import FilesToDelete, HarvestCorpus, HarvestJob, HarvestShard
from harvest.selectors import has_runner, no_such_harvest

logger = structlog.get_logger(__name__)

LOOK = "harvest.look"
LOOK_SECONDS = 60
TRIES_AT_MOST = 3
SETBACKS_AT_MOST = 30
SWEEP_BATCH = 100
NO_RUNNER = "No runner is there for {model}."
RUNNER_DUE_AFTER_GRACE = timedelta(seconds=10)
RUNNER_STOPPED = f"The runner stopped while it ran this job, {TRIES_AT_MOST} times."


@dataclass(frozen=True, kw_only=True)
class HarvestPlan:
    """What was asked for, checked: `layers` ascend, `directions` are float32 [directions, hidden] bytes."""

    base_model_id: int
    model: str
    prompts: Sequence[str]
    layers: tuple[int, ...]
    shard_size: int
    batch_size: int | None
    add_special_tokens: bool
    directions: bytes | None
    reserved_tokens: int
    bytes_at_most: int


class AlreadySubmitted(Exception):
    """The request's Idempotency-Key has made the job `job_id` already."""

    def __init__(self, job_id: uuid.UUID) -> None:
        super().__init__(str(job_id))
        self.job_id = job_id


def submit_harvest(
    *, user: User, api_key: ApiKey | None, plan: HarvestPlan, request: IdempotentRequest | None = None
) -> HarvestJob:
    """Put a job in line, its reserved tokens held; `request` is to be done once.

    Raises ApiError: `harvest_concurrency_exceeded`, `harvest_quota_exceeded`, `corpus_too_large`, `budget_exceeded`,
    and `401` when the key or the User has been deleted meanwhile; for `request` also AlreadySubmitted and
    `idempotency_conflict`. The rows of the User and the key are locked first,
    so that of two submits at once one sees the other.
    """
    record_storage_folder()
    prompts_zstd = zstandard.compress(json.dumps(plan.prompts, ensure_ascii=False).encode(), level=3)
    with transaction.atomic():
        owner = lock_payers(user, api_key)
        job_id = new_uuid7()
        # Before the limits: the first of two at once may have taken the last place for both.
        if request is not None and (bound := bind_work(request, job_id)) != job_id:
            raise AlreadySubmitted(bound)
        require_place(owner, api_key)
        require_monthly_count(owner, api_key)
        require_storage(owner, plan.bytes_at_most)
        check_room(user=owner, api_key=api_key, tokens=plan.reserved_tokens)
        job = HarvestJob(
            id=job_id,
            user=owner,
            api_key=api_key,
            base_model_id=plan.base_model_id,
            model=plan.model,
            layers=list(plan.layers),
            shard_size=plan.shard_size,
            batch_size=plan.batch_size,
            add_special_tokens=plan.add_special_tokens,
            contents=_contents(plan),
            n_prompts=len(plan.prompts),
            reserved_tokens=plan.reserved_tokens,
            bytes_at_most=plan.bytes_at_most,
            runner_due_at=None if has_runner(plan.base_model_id) else _runner_due_at(),
        )
        job.save(force_insert=True)
        HarvestCorpus.objects.create(job=job, prompts_zstd=prompts_zstd, directions=plan.directions)
        # Last, because it locks the Budget until the commit: the User's other work must not wait for a large corpus.
        job.hold = take_hold(user=owner, api_key=api_key, tokens=plan.reserved_tokens, work=_work(job.pk, job.model))
        job.save(update_fields=["hold"])
        transaction.on_commit(lambda: tell_runners(plan.model))
    logger.info("harvest submitted", job_id=str(job.id), model=job.model, n_prompts=job.n_prompts)
    return job


def run_again(*, job_id: uuid.UUID) -> HarvestJob:
    """Put the corpus of an ended job in line once more, as a new job of the same User and key, held anew.

    Raises ApiError: `invalid_request` for a job that has not ended or whose prompts were deleted,
    `harvest_unsupported` for a model that takes none now, and what `submit_harvest` raises.
    """
    job = HarvestJob.objects.select_related("user", "api_key", "base_model").get(pk=job_id)
    corpus = HarvestCorpus.objects.filter(job=job).first()
    if not job.is_ended:
        raise ApiError(ErrorCode.INVALID_REQUEST, "The job has not ended.")
    if corpus is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Its prompts were deleted with its files.")
    if not (job.base_model.is_enabled and job.base_model.has_harvest):
        raise ApiError(ErrorCode.HARVEST_UNSUPPORTED, f"{job.base_model.name} takes no Harvest jobs.")
    plan = HarvestPlan(
        base_model_id=job.base_model_id,
        model=job.base_model.name,
        prompts=json.loads(zstandard.decompress(bytes(corpus.prompts_zstd))),
        layers=tuple(job.layers),
        shard_size=job.shard_size,
        batch_size=job.batch_size,
        add_special_tokens=job.add_special_tokens,
        directions=None if corpus.directions is None else bytes(corpus.directions),
        reserved_tokens=job.reserved_tokens,
        bytes_at_most=job.bytes_at_most,
    )
    return submit_harvest(user=job.user, api_key=job.api_key, plan=plan)


def tell_runners(model: str) -> None:
    """Say "look" to the runners of `model`. They look by themselves too: a broker that is away only costs seconds."""
    try:
        app.send_task(LOOK, queue=runner_queue(model), expires=LOOK_SECONDS, retry=False)
    except OperationalError:
        logger.warning("the broker is away; runners will look by themselves", model=model)


def runner_queue(model: str) -> str:
    """The Celery queue of a model's runners."""
    return f"harvest.{model}"


def cancel_harvest(*, job_id: uuid.UUID) -> HarvestJob:
    """End a job as cancelled, at once; its runner stops within a second. A job that has ended stays as it is.

    Charged: the reserved tokens when its GPU run has started, else nothing.
    """
    with transaction.atomic():
        job = _lock(job_id)
        if not job.is_ended:
            tokens = job.reserved_tokens if job.started_at else 0
            _end(job, HarvestJob.Status.CANCELLED, tokens=tokens)
    return job


def take_in(*, job_id: uuid.UUID) -> None:
    """Note that a runner came within the grace: from now on the job waits for it as long as any other."""
    HarvestJob.objects.filter(pk=job_id).update(runner_due_at=None)


def fail_unavailable(*, job_id: uuid.UUID, error: str) -> bool:
    """Fail a job that no runner has taken, with 0 tokens. False when one took it, or it ended, meanwhile."""
    with transaction.atomic():
        job = _lock(job_id)
        if job.status != HarvestJob.Status.PENDING or job.started_at is not None:
            return False
        _fail_unavailable(job, error)
    return True


def record_shard(
    *, job_id: uuid.UUID, owner: uuid.UUID, index: int, stored: StoredObject, sums_key: str
) -> HarvestShard:
    """Note that a shard and its sums are whole in storage. Raises LeaseLostError."""
    with transaction.atomic():
        lock_leased(HarvestJob, pk=job_id, owner=owner)
        shard, _ = HarvestShard.objects.update_or_create(
            job_id=job_id,
            index=index,
            defaults={"key": stored.key, "bytes": stored.bytes, "sha256": stored.sha256, "sums_key": sums_key},
        )
    return shard


def record_progress(*, job_id: uuid.UUID, owner: uuid.UUID, prompts: int, tokens: int, bytes_written: int) -> None:
    """Note how far the run is. Raises LeaseLostError."""
    running = HarvestJob.objects.filter(pk=job_id, lease_owner=owner, status=HarvestJob.Status.RUNNING)
    if not running.update(prompts_done=prompts, tokens_done=tokens, bytes_written=bytes_written):
        raise LeaseLostError


def finish_harvest(*, job_id: uuid.UUID, owner: uuid.UUID, tokens: int, result: dict[str, Any]) -> HarvestJob:
    """End a job as done; `tokens` is what the engine read. Raises LeaseLostError."""
    with transaction.atomic():
        job = lock_leased(HarvestJob, pk=job_id, owner=owner)
        charged = min(tokens, job.reserved_tokens)
        job.bytes_written = result["bytes_written"]
        job.prompts_done, job.tokens_done = job.n_prompts, tokens
        _end(job, HarvestJob.Status.DONE, tokens=charged, result={**result, "tokens": charged})
        # The sums of the shards were for a run that begins again.
        for folder in {sums_key.rpartition("/")[0] for sums_key in job.shards.values_list("sums_key", flat=True)}:
            FilesToDelete.objects.get_or_create(prefix=folder, defaults={"not_before": timezone.now()})
    return job


def fail_try(*, job_id: uuid.UUID, owner: uuid.UUID, error: str, is_last: bool = False) -> HarvestJob:
    """Count a try that failed by the job's own doing: it waits again, and after 3 tries ends `failed` with `error`.

    `is_last` ends it now: another try would fail too. Raises LeaseLostError.
    """
    with transaction.atomic():
        job = lock_leased(HarvestJob, pk=job_id, owner=owner)
        _count_try(job, error, is_last=is_last)
    return job


def hand_back(*, job_id: uuid.UUID, owner: uuid.UUID, because_storage_is_away: bool = False) -> HarvestJob:
    """Put a running job back in line without counting a try: its runner stops, or the storage is away.

    A storage that is away makes it wait longer each time, and ends it `failed` after some 4 hours.
    Raises LeaseLostError.
    """
    with transaction.atomic():
        job = lock_leased(HarvestJob, pk=job_id, owner=owner)
        if not because_storage_is_away:
            put_back(job)
        elif job.setbacks + 1 >= SETBACKS_AT_MOST:
            _end(job, HarvestJob.Status.FAILED, tokens=0, error="The file storage was away for too long.")
        else:
            put_back(job, setback=True, after=timedelta(seconds=min(600, 5 * 2**job.setbacks)))
        transaction.on_commit(lambda: tell_runners(job.model))
    job.refresh_from_db()
    return job


def end_expired_leases() -> int:
    """Put jobs whose runner has gone silent back in line, or fail them at their third time; returns how many."""

    def end(job: HarvestJob) -> None:
        logger.warning("harvest lease ran out", job_id=str(job.id), tries=job.tries + 1)
        _count_try(job, RUNNER_STOPPED)

    return each_locked(expired(HarvestJob), end, at_most=SWEEP_BATCH)


def end_graces() -> int:
    """Decide about jobs whose runner was due and whose API process died before it could; returns how many.

    A runner is there now: the job is taken in. None is: it fails, with 0 tokens.
    """

    def decide(job: HarvestJob) -> None:
        if job.started_at is not None or has_runner(job.base_model_id):
            take_in(job_id=job.pk)
        else:
            _fail_unavailable(job, NO_RUNNER.format(model=job.model))

    late = HarvestJob.objects.filter(runner_due_at__lt=Now(), status=HarvestJob.Status.PENDING)
    return each_locked(late, decide, at_most=SWEEP_BATCH)


def end_orphaned_harvest_holds() -> SweepCount:
    """Release the Holds of Harvest jobs that are no more (deleted by hand). One that ended has ended its own."""

    def find_living(holds: Sequence[Hold]) -> Collection[uuid.UUID]:
        ids = [uuid.UUID(hold.work_id) for hold in holds]
        unfinished = set(HarvestJob.objects.filter(UNFINISHED, pk__in=ids).values_list("pk", flat=True))
        return [hold.pk for hold in holds if uuid.UUID(hold.work_id) in unfinished]

    # A Hold and its job are written in one transaction, and seen together.
    return end_orphaned_holds(kind=WorkKind.HARVEST, find_living=find_living, taken_before=timezone.now())


def fail_untaken() -> int:
    """Fail jobs that have waited for a runner longer than `settings.HARVEST_PENDING_AT_MOST`; returns how many.

    The time under a Spend limit or a pause, when no runner may take a job, does not count.
    """
    if not may_start_work():
        HarvestJob.objects.filter(status=HarvestJob.Status.PENDING).update(waiting_since=Now())
        return 0
    hours = settings.HARVEST_PENDING_AT_MOST.total_seconds() / 3600
    late = HarvestJob.objects.filter(
        status=HarvestJob.Status.PENDING, waiting_since__lt=Now() - settings.HARVEST_PENDING_AT_MOST
    )

    def end(job: HarvestJob) -> None:
        _end(job, HarvestJob.Status.FAILED, tokens=0, error=f"No runner took this job within {hours:g} hours.")

    return each_locked(late, end, at_most=SWEEP_BATCH)


def delete_files(*, job_id: uuid.UUID) -> HarvestJob:
    """Let go of an ended job's files and prompts; ApiError for a job that has not ended. Twice is fine."""
    with transaction.atomic():
        job = _lock(job_id)
        if not job.is_ended:
            raise ApiError(ErrorCode.INVALID_REQUEST, "The job has not ended; cancel it first.")
        let_go_of_files(job)
        job.files_deleted_at = job.files_deleted_at or timezone.now()
        job.save(update_fields=["files_deleted_at"])
        job.shards.all().delete()
        HarvestCorpus.objects.filter(job=job).delete()
    return job


def delete_old_files() -> int:
    """Delete the files of jobs that ended longer ago than `settings.HARVEST_FILES_KEPT`, where that is set."""
    if settings.HARVEST_FILES_KEPT is None:
        return 0
    ended = HarvestJob.objects.filter(
        completed_at__lt=Now() - settings.HARVEST_FILES_KEPT, files_deleted_at__isnull=True
    )
    ids = list(ended.order_by("completed_at").values_list("pk", flat=True)[:SWEEP_BATCH])
    for job_id in ids:
        delete_files(job_id=job_id)
    return len(ids)


def let_go_of_files(job: HarvestJob, *, after: timedelta = timedelta(0)) -> None:
    """Have the scheduler delete a job's files in storage, in the transaction that runs now."""
    FilesToDelete.objects.get_or_create(prefix=job.storage_prefix, defaults={"not_before": timezone.now() + after})


def delete_unneeded_files() -> int:
    """Delete from storage what `let_go_of_files` named; returns how many prefixes. Raises StorageError."""
    storage = get_storage()
    due = list(FilesToDelete.objects.filter(not_before__lte=Now()).order_by("not_before")[:SWEEP_BATCH])
    for files in due:
        storage.delete_prefix(files.prefix)
        files.delete()
    return len(due)


def _end(
    job: HarvestJob,
    status: HarvestJob.Status,
    *,
    tokens: int,
    error: str = "",
    result: dict[str, Any] | None = None,
) -> None:
    """Write the end of a locked job. Every end comes through here, so that its Hold ends in the same transaction.

    `tokens` are charged; where they are 0 because nothing came of the job, its Hold is released.
    """
    job.status, job.tokens, job.error, job.result = status, tokens, error, result
    job.lease_owner = job.lease_expires_at = job.retry_at = job.runner_due_at = None
    job.completed_at = timezone.now()
    job.save()
    if job.hold_id is not None:
        _end_hold(job, job.hold_id)
    if status != HarvestJob.Status.DONE:
        # Shards without a manifest are of no use; the runner that wrote them may need a moment to notice.
        let_go_of_files(job, after=2 * settings.LEASE)
        job.shards.all().delete()
    logger.info("harvest ended", job_id=str(job.id), status=str(status), tokens=tokens)


def _fail_unavailable(job: HarvestJob, error: str) -> None:
    _end(job, HarvestJob.Status.FAILED, tokens=0, error=error)
    # Refused before any work: a retry with the same Idempotency-Key is to find a runner, not this failure.
    free_work(user_id=job.user_id, work_id=job.pk)


def _end_hold(job: HarvestJob, hold_id: uuid.UUID) -> None:
    is_charged = job.status == HarvestJob.Status.DONE or bool(job.tokens)
    end = settle_hold(hold=hold_id, tokens=job.tokens or 0) if is_charged else release_hold(hold=hold_id)
    if not end.changed:
        logger.error("the hold of a harvest had ended before it", job_id=str(job.pk), charged=end.charged)


def _work(job_id: uuid.UUID, model: str) -> WorkRef:
    return WorkRef(WorkKind.HARVEST, str(job_id), model=model)


def _lock(job_id: uuid.UUID) -> HarvestJob:
    """The job, locked until the transaction ends. Raises `404 not_found`."""
    job = HarvestJob.objects.select_for_update(of=("self",)).filter(pk=job_id).first()
    if job is None:
        raise no_such_harvest()
    return job


def _runner_due_at() -> datetime:
    # The API's own wait comes to its end first; the sweep is for a process that died.
    return timezone.now() + settings.RUNNER_GRACE + RUNNER_DUE_AFTER_GRACE


def _count_try(job: HarvestJob, error: str, *, is_last: bool = False) -> None:
    job.tries += 1
    if is_last or job.tries >= TRIES_AT_MOST:
        _end(job, HarvestJob.Status.FAILED, tokens=0, error=error)
        return
    put_back(job)
    transaction.on_commit(lambda: tell_runners(job.model))


def _contents(plan: HarvestPlan) -> HarvestJob.Contents:
    return HarvestJob.Contents.ACTIVATIONS if plan.directions is None else HarvestJob.Contents.PROJECTIONS
