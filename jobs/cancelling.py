"""Cancelling a Job from the API: at once for its User, and within a second in the engine."""

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from django.conf import settings
from psycopg import Error as DatabaseAway

from acsinfra.core.courier import Courier
from acsinfra.core.db import database_step
from inference.bus.frames import Cancel
from inference.bus.replies import post_control
from jobs import services
from jobs.models import CompletionJob
from jobs.selectors import is_still_running

# How long the worker's own count is waited for.
COUNT_SECONDS: Final = 1.0
LOOK_SECONDS: Final = (0.01, 0.02, 0.03, 0.05)

_couriers: WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = WeakKeyDictionary()


async def cancel(job_id: uuid.UUID) -> CompletionJob:
    """Cancel a Job, and return it as it is then: ended, whatever becomes of its worker.

    The worker of one that runs is told, and ends it with its own count; past a second its last count is charged.
    """
    job = await database_step(services.request_cancel, job_id=job_id)
    if job.is_ended:
        return job
    _tell_worker(job)
    deadline = time.monotonic() + COUNT_SECONDS
    looks = 0
    with suppress(DatabaseAway):
        while time.monotonic() < deadline and await is_still_running(job_id):
            await asyncio.sleep(LOOK_SECONDS[min(looks, len(LOOK_SECONDS) - 1)])
            looks += 1
    return await database_step(services.cancel_job, job_id=job_id)


def _tell_worker(job: CompletionJob) -> None:
    # A worker that does not hear of it sees it on the row within half a second.
    loop = asyncio.get_running_loop()
    if loop not in _couriers:
        _couriers[loop] = Courier(settings.BROKER_URL)
    post_control(_couriers[loop], job.model, Cancel(job.request_id), patience=COUNT_SECONDS)
