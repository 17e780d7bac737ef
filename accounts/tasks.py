"""The Celery tasks of accounts."""

from collections.abc import Mapping

from celery import shared_task
from django.contrib.sessions.models import Session
from django.db.models.functions import Now

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"accounts.delete_expired_sessions": 3600}


@shared_task(name="accounts.delete_expired_sessions", ignore_result=True)
def delete_expired_sessions() -> None:
    """Delete sessions that have expired. Failed sign-ins are deleted by axes itself, at each sign-in."""
    Session.objects.filter(expire_date__lt=Now()).delete()
