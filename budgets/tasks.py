"""The Celery tasks of the money."""

from collections.abc import Mapping

from celery import shared_task

from budgets import limits

# What the scheduler runs, and every how many seconds. Holds are swept by the apps that know of their work.
SWEEPS: Mapping[str, float] = {"budgets.apply_limits": 60}


@shared_task(name="budgets.apply_limits", ignore_result=True)
def apply_limits() -> None:
    """Bring this month's Budgets under the limits as they are now."""
    limits.apply_limits()
