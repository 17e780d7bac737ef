"""What the API tells the workers of a model: to look for Jobs, and to stop one.

Neither is needed for a promise: workers look by themselves, every 2 seconds for Jobs and every half for cancels.
"""

from typing import Final

from acsinfra.core.celery_messages import celery_message
from acsinfra.core.courier import shared_courier
from inference.bus.frames import Cancel
from inference.bus.replies import post_control
from jobs.models import CompletionJob
from jobs.services import LOOK, jobs_queue

LOOK_PATIENCE_SECONDS: Final = 2.0


def tell_to_look(model: str) -> None:
    """Say "look" to a worker of `model`: the message that Celery would send, without its blocking client."""
    message = celery_message(task=LOOK, queue=jobs_queue(model), kwargs={})
    shared_courier().post("LPUSH", jobs_queue(model), message, patience=LOOK_PATIENCE_SECONDS)


def tell_to_stop(job: CompletionJob, *, patience: float) -> None:
    """Tell the worker that runs `job` to stop at once, for `patience` seconds."""
    post_control(shared_courier(), job.model, Cancel(job.request_id), patience=patience)
