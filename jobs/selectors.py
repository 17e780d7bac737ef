"""What reads Jobs."""

import uuid
from collections.abc import Collection, Sequence

from django.conf import settings
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from accounts.models import User
from acsinfra.core.db import fetch_one
from acsinfra.core.errors import not_found
from acsinfra.core.listing import ListQuery, Page, list_page
from budgets.models import Hold
from inference.models import BaseModel, Engine
from jobs.models import CompletionJob

UNFINISHED = Q(status__in=[CompletionJob.Status.QUEUED, CompletionJob.Status.RUNNING])


def job_of(user: User, job_id: uuid.UUID) -> CompletionJob:
    """The User's Job; the same `404 not_found` for another User's as for one that never was."""
    job = CompletionJob.objects.filter(user=user, pk=job_id).first()
    if job is None:
        raise not_found("There is no such Job.")
    return job


def list_jobs(user: User, asked: ListQuery) -> Page[CompletionJob]:
    """A page of the User's Jobs. Raises `400` for an `after` that is none of theirs."""
    return list_page(CompletionJob.objects.filter(user=user), asked, noun="Job")


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
