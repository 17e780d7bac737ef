"""What reads Harvest jobs."""

import uuid

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from accounts.models import User
from acsinfra.core.db import fetch_one
from acsinfra.core.errors import ApiError, not_found
from acsinfra.core.listing import ListQuery, Page, list_page
from harvest.models import HarvestJob
from inference.models import Engine


def harvest_of(user: User, job_id: uuid.UUID) -> HarvestJob:
    """The User's job; the same `404 not_found` for another User's as for one that never was."""
    job = HarvestJob.objects.filter(user=user, pk=job_id).first()
    if job is None:
        raise no_such_harvest()
    return job


def no_such_harvest() -> ApiError:
    """The one 404 of a job that is gone, another User's or never was."""
    return not_found("There is no such Harvest job.")


def list_harvests(user: User, asked: ListQuery) -> Page[HarvestJob]:
    """A page of the User's jobs with their shards. Raises `400` for an `after` that is none of theirs."""
    jobs = HarvestJob.objects.filter(user=user).prefetch_related("shards")
    return list_page(jobs, asked, noun="Harvest job")


def models_with_waiting_jobs() -> list[str]:
    """The names of models that have jobs ready to be claimed and a runner to tell of them."""
    ready = Q(retry_at__isnull=True) | Q(retry_at__lte=Now())
    waiting = HarvestJob.objects.filter(
        ready,
        status=HarvestJob.Status.PENDING,
        base_model__engines__kind=Engine.Kind.RUNNER,
        base_model__engines__heartbeat_at__gte=Now() - settings.ENGINE_SILENT_AFTER,
    )
    return list(waiting.order_by().values_list("base_model__name", flat=True).distinct())


def has_runner(base_model_id: int) -> bool:
    """Whether a runner of the Base model has sent its heartbeat lately."""
    heard_of = Engine.objects.filter(heartbeat_at__gte=Now() - settings.ENGINE_SILENT_AFTER)
    return heard_of.filter(base_model_id=base_model_id, kind=Engine.Kind.RUNNER).exists()


async def is_runner_registered(base_model_id: int) -> bool:
    """`has_runner` from an async view: one statement on the async pool."""
    row = await fetch_one(
        "SELECT 1 FROM inference_engine WHERE base_model_id = %s AND kind = 'runner' AND heartbeat_at >= now() - %s",
        [base_model_id, settings.ENGINE_SILENT_AFTER],
    )
    return row is not None
