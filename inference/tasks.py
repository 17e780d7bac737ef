"""The Celery tasks of inference workers."""

from typing import Any

from celery import shared_task

from inference.bus.envelope import TASK


@shared_task(name=TASK, ignore_result=True)
def complete(*, envelope: dict[str, Any]) -> None:
    """Answer one Completion; runs in an inference worker only, and returns when its last frame is on its way."""
    from inference.worker.process import running_worker

    running_worker().complete(envelope)
