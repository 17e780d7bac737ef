"""What changes Harvest jobs. Each function is one transaction."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
import zstandard
from django.conf import settings
from django.db import transaction
from django.db.models import Q, Sum
from django.db.models.functions import Coalesce, Now
from django.utils import timezone
from kombu.exceptions import OperationalError

from accounts.models import ApiKey, User
from accounts.selectors import limit as limit_of
from acsinfra.celery import app
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.leases import LeaseLostError, lock_expired, lock_leased, put_back
from acsinfra.core.shared_folder import record_storage_folder
from acsinfra.core.storage import StoredObject, get_storage
from harvest.models import FilesToDelete, HarvestCorpus, HarvestJob, HarvestShard

logger = structlog.get_logger(__name__)

LOOK = "harvest.look"
LOOK_SECONDS = 60
TRIES_AT_MOST = 3
SETBACKS_AT_MOST = 30
_UNFINISHED = Q(status__in=[HarvestJob.Status.PENDING, HarvestJob.Status.RUNNING])
_RUNNER_STOPPED = "The runner stopped while it ran this job, {tries} times."


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


def submit_harvest(*, user: User, api_key: ApiKey | None, plan: HarvestPlan) -> HarvestJob:
    """Put a job in line. Raises ApiError: `harvest_concurrency_exceeded`, `harvest_quota_exceeded`, `corpus_too_large`.

    The rows of the User and the key are locked first, so that of two submits at once one sees the other.
    """
    record_storage_folder()
    prompts_zstd = zstandard.compress(json.dumps(plan.prompts, ensure_ascii=False).encode(), level=3)
    with transaction.atomic():
        owner = User.objects.select_for_update(no_key=True, of=("self",)).get(pk=user.pk)
        if api_key is not None:
            ApiKey.objects.select_for_update(no_key=True, of=("self",)).get(pk=api_key.pk)
        _require_place(owner, api_key)
        _require_monthly_count(owner, api_key)
        _require_room(owner, plan.bytes_at_most)
        # The Hold of `reserved_tokens` belongs in this transaction.
        job = HarvestJob.objects.create(
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
        )
        HarvestCorpus.objects.create(job=job, prompts_zstd=prompts_zstd, directions=plan.directions)
        transaction.on_commit(lambda: tell_runners(plan.model))
    logger.info("harvest submitted", job_id=str(job.id), model=job.model, n_prompts=job.n_prompts)
    return job


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
        job = HarvestJob.objects.select_for_update(of=("self",)).get(pk=job_id)
        if not job.is_ended:
            tokens = job.reserved_tokens if job.started_at else 0
            _end(job, HarvestJob.Status.CANCELLED, tokens=tokens)
    return job


def fail_unavailable(*, job_id: uuid.UUID, error: str) -> bool:
    """Fail a job that no runner has taken, with 0 tokens. False when one took it, or it ended, meanwhile."""
    with transaction.atomic():
        job = HarvestJob.objects.select_for_update(of=("self",)).get(pk=job_id)
        if job.status != HarvestJob.Status.PENDING or job.started_at is not None:
            return False
        _end(job, HarvestJob.Status.FAILED, tokens=0, error=error)
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


def fail_try(*, job_id: uuid.UUID, owner: uuid.UUID, error: str) -> HarvestJob:
    """Count a try that failed by the job's own doing: it waits again, and after 3 tries ends `failed` with `error`.

    Raises LeaseLostError.
    """
    with transaction.atomic():
        job = lock_leased(HarvestJob, pk=job_id, owner=owner)
        _count_try(job, error)
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
    with transaction.atomic():
        jobs = lock_expired(HarvestJob, at_most=100)
        for job in jobs:
            logger.warning("harvest lease ran out", job_id=str(job.id), tries=job.tries + 1)
            _count_try(job, _RUNNER_STOPPED.format(tries=TRIES_AT_MOST))
    return len(jobs)


def fail_untaken() -> int:
    """Fail jobs that have waited for a runner longer than `settings.HARVEST_PENDING_AT_MOST`; returns how many."""
    hours = settings.HARVEST_PENDING_AT_MOST.total_seconds() / 3600
    with transaction.atomic():
        late = HarvestJob.objects.filter(
            status=HarvestJob.Status.PENDING, waiting_since__lt=Now() - settings.HARVEST_PENDING_AT_MOST
        )
        jobs = list(late.select_for_update(skip_locked=True, of=("self",))[:100])
        for job in jobs:
            _end(job, HarvestJob.Status.FAILED, tokens=0, error=f"No runner took this job within {hours:g} hours.")
    return len(jobs)


def delete_files(*, job_id: uuid.UUID) -> HarvestJob:
    """Let go of an ended job's files and prompts; ApiError for a job that has not ended. Twice is fine."""
    with transaction.atomic():
        job = HarvestJob.objects.select_for_update(of=("self",)).get(pk=job_id)
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
    ids = list(ended.order_by("completed_at").values_list("pk", flat=True)[:100])
    for job_id in ids:
        delete_files(job_id=job_id)
    return len(ids)


def let_go_of_files(job: HarvestJob, *, after: timedelta = timedelta(0)) -> None:
    """Have the scheduler delete a job's files in storage, in the transaction that runs now."""
    FilesToDelete.objects.get_or_create(prefix=job.storage_prefix, defaults={"not_before": timezone.now() + after})


def delete_unneeded_files() -> int:
    """Delete from storage what `let_go_of_files` named; returns how many prefixes. Raises StorageError."""
    storage = get_storage()
    due = list(FilesToDelete.objects.filter(not_before__lte=Now()).order_by("not_before")[:100])
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
    """Write the end of a locked job. Every end comes through here, so that its Hold ends in the same transaction."""
    job.status, job.tokens, job.error, job.result = status, tokens, error, result
    job.lease_owner = job.lease_expires_at = job.retry_at = None
    job.completed_at = timezone.now()
    job.save()
    if status != HarvestJob.Status.DONE:
        # Shards without a manifest are of no use; the runner that wrote them may need a moment to notice.
        let_go_of_files(job, after=2 * settings.LEASE)
        job.shards.all().delete()
    logger.info("harvest ended", job_id=str(job.id), status=str(status), tokens=tokens)


def _count_try(job: HarvestJob, error: str) -> None:
    job.tries += 1
    if job.tries >= TRIES_AT_MOST:
        _end(job, HarvestJob.Status.FAILED, tokens=0, error=error)
        return
    put_back(job)
    transaction.on_commit(lambda: tell_runners(job.model))


def _contents(plan: HarvestPlan) -> HarvestJob.Contents:
    return HarvestJob.Contents.ACTIVATIONS if plan.directions is None else HarvestJob.Contents.PROJECTIONS


def _jobs_of(user: User, api_key: ApiKey | None) -> Any:
    """The key's jobs; those from the App have none, and count by their User."""
    return HarvestJob.objects.filter(user=user, api_key=api_key)


def _require_place(user: User, api_key: ApiKey | None) -> None:
    limit = limit_of(user, "harvests_unfinished")
    if limit is not None and _jobs_of(user, api_key).filter(_UNFINISHED).count() >= limit:
        raise ApiError(
            ErrorCode.HARVEST_CONCURRENCY_EXCEEDED,
            f"This API key has {limit} unfinished Harvest job{'' if limit == 1 else 's'}, as many as it may. "
            "Wait for one to end, or cancel it.",
            headers={"Retry-After": "30"},
        )


def _require_monthly_count(user: User, api_key: ApiKey | None) -> None:
    limit = limit_of(user, "harvests_per_month")
    if limit is None:
        return
    month = timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if _jobs_of(user, api_key).filter(created_at__gte=month).count() >= limit:
        raise ApiError(
            ErrorCode.HARVEST_QUOTA_EXCEEDED,
            f"This API key has submitted its {limit} Harvest jobs of this month; a new month begins a new count.",
            headers={"x-should-retry": "false"},
        )


def _require_room(user: User, bytes_at_most: int) -> None:
    quota = limit_of(user, "storage_quota_bytes")
    if quota is None:
        return
    jobs = HarvestJob.objects.filter(user=user)
    kept = jobs.filter(status=HarvestJob.Status.DONE, files_deleted_at__isnull=True).aggregate(
        sum=Coalesce(Sum("bytes_written"), 0)
    )["sum"]
    to_come = jobs.filter(_UNFINISHED).aggregate(sum=Coalesce(Sum("bytes_at_most"), 0))["sum"]
    left = max(0, quota - kept - to_come)
    if bytes_at_most > left:
        raise ApiError(
            ErrorCode.CORPUS_TOO_LARGE,
            f"This job may write up to {bytes_at_most:,} bytes; your storage has room for {left:,} more. "
            "Delete files of ended jobs, or send fewer prompts or layers.",
            param="prompts",
        )
