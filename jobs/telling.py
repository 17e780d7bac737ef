"""What the API tells the workers of a model: to look for Jobs, and to stop one.

Neither is needed for a promise: workers look by themselves, every 2 seconds for Jobs and every half for cancels.
"""

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

from django.conf import settings

from acsinfra.core.courier import Courier
from inference.bus.envelope import celery_message
from inference.bus.frames import Cancel
from inference.bus.replies import post_control
from jobs.models import CompletionJob
from jobs.services import LOOK, jobs_queue

LOOK_PATIENCE_SECONDS: Final = 2.0

_couriers: WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = WeakKeyDictionary()


def tell_to_look(model: str) -> None:
    """Say "look" to a worker of `model`: the message that Celery would send, without its blocking client."""
    message = celery_message(task=LOOK, queue=jobs_queue(model), kwargs={})
    _courier().post("LPUSH", jobs_queue(model), message, patience=LOOK_PATIENCE_SECONDS)


def tell_to_stop(job: CompletionJob, *, patience: float) -> None:
    """Tell the worker that runs `job` to stop at once, for `patience` seconds."""
    post_control(_courier(), job.model, Cancel(job.request_id), patience=patience)


def _courier() -> Courier:
    loop = asyncio.get_running_loop()
    if loop not in _couriers:
        _couriers[loop] = Courier(settings.BROKER_URL)
    return _couriers[loop]
