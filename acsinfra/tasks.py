"""The Celery tasks of what every app shares."""

from collections.abc import Mapping

import structlog
from celery import shared_task

from acsinfra.core import idempotency, traffic
from acsinfra.core.storage import StorageError

logger = structlog.get_logger(__name__)

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"acsinfra.delete_old_idempotency_keys": 600, "acsinfra.fold_old_counts": 3600}


@shared_task(name="acsinfra.delete_old_idempotency_keys", ignore_result=True)
def delete_old_idempotency_keys() -> None:
    """Delete what Idempotency-Keys keep past its time."""
    idempotency.delete_old_keys()
    try:
        idempotency.delete_old_files()
    except StorageError as error:
        logger.warning("could not delete files; the next sweep will", reason=str(error))


@shared_task(name="acsinfra.fold_old_counts", ignore_result=True)
def fold_old_counts() -> None:
    """Add up the counts of requests of hours long ago."""
    traffic.fold_old_counts()
