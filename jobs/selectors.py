"""What reads Jobs."""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from django.conf import settings
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from accounts.models import User
from acsinfra.core.db import fetch_one
from acsinfra.core.errors import invalid, not_found
from budgets.models import Hold
from inference.models import BaseModel, Engine
from jobs.models import CompletionJob

UNFINISHED = Q(status__in=[CompletionJob.Status.QUEUED, CompletionJob.Status.RUNNING])


@dataclass(frozen=True)
class JobPage:
    """A page of Jobs, newest first, and whether older ones follow."""

    jobs: list[CompletionJob]
    has_more: bool


def job_of(user: User, job_id: uuid.UUID) -> CompletionJob:
    """The User's Job; the same `404 not_found` for another User's as for one that never was."""
    job = CompletionJob.objects.filter(user=user, pk=job_id).first()
    if job is None:
        raise not_found("There is no such Job.")
    return job


def list_jobs(
    *, user: User, limit: int, after: uuid.UUID | None = None, status: str | None = None, model: str | None = None
) -> JobPage:
    """The User's Jobs older than the Job `after`, newest first. Raises `400` for an `after` that is none of theirs."""
    jobs = CompletionJob.objects.filter(user=user)
    if after is not None:
        if not jobs.filter(pk=after).exists():
            raise invalid("after is not the id of one of your Jobs.", param="after")
        jobs = jobs.filter(pk__lt=after)
    if status is not None:
        jobs = jobs.filter(status=status)
    if model is not None:
        jobs = jobs.filter(model=model)
    found = list(jobs.order_by("-pk")[: limit + 1])
    return JobPage(jobs=found[:limit], has_more=len(found) > limit)


async def is_still_running(job_id: uuid.UUID) -> bool:
    """Whether the Job runs at this moment."""
    return (
        await fetch_one("SELECT 1 FROM jobs_completionjob WHERE id = %s AND status = 'running'", [job_id]) is not None
    )


def models_with_waiting_jobs() -> list[str]:
    """The names of models that have Jobs ready to be claimed and an engine to tell of them."""
    ready = Q(retry_at__isnull=True) | Q(retry_at__lte=Now())
    waiting = CompletionJob.objects.filter(ready, base_model=OuterRef("pk"), status=CompletionJob.Status.QUEUED)
    engines = Engine.objects.filter(
        base_model=OuterRef("pk"),
        kind=Engine.Kind.INFERENCE,
        status=Engine.Status.LIVE,
        heartbeat_at__gte=Now() - settings.ENGINE_SILENT_AFTER,
    )
    found = BaseModel.objects.filter(Exists(waiting), Exists(engines))
    return list(found.order_by().values_list("name", flat=True))


def holds_of_living_jobs(holds: Sequence[Hold]) -> Collection[uuid.UUID]:
    """The ids of those Holds whose Job has not ended."""
    unfinished = CompletionJob.objects.filter(UNFINISHED, pk__in=[hold.work_id for hold in holds])
    return {hold_id for hold_id in unfinished.values_list("hold_id", flat=True) if hold_id is not None}
