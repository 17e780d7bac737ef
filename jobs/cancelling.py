"""Cancelling a Job from the API: at once for its User, and within a second in the engine."""

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Final

from psycopg import Error as DatabaseAway

from acsinfra.core.db import database_step
from jobs import services
from jobs.models import CompletionJob
from jobs.selectors import is_still_running
from jobs.telling import tell_to_stop

# How long the worker's own count is waited for.
COUNT_SECONDS: Final = 1.0
LOOK_SECONDS: Final = (0.01, 0.02, 0.03, 0.05)


async def cancel(job_id: uuid.UUID) -> CompletionJob:
    """Cancel a Job, and return it as it is then: ended, whatever becomes of its worker.

    The worker of one that runs is told, and ends it with its own count; past a second its last count is charged.
    """
    job = await database_step(services.request_cancel, job_id=job_id)
    if job.is_ended:
        return job
    tell_to_stop(job, patience=COUNT_SECONDS)
    deadline = time.monotonic() + COUNT_SECONDS
    looks = 0
    with suppress(DatabaseAway):
        while time.monotonic() < deadline and await is_still_running(job_id):
            await asyncio.sleep(LOOK_SECONDS[min(looks, len(LOOK_SECONDS) - 1)])
            looks += 1
    return await database_step(services.cancel_job, job_id=job_id)
