"""The Celery tasks of inference workers."""

from collections.abc import Mapping
from typing import Any

from celery import shared_task

from inference import charges, services
from inference.bus.envelope import TASK

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"inference.sweep_silent_engines": 5, "inference.sweep_charges": 5}


@shared_task(name=TASK, ignore_result=True)
def complete(*, envelope: dict[str, Any]) -> None:
    """Answer one Completion; runs in an inference worker only, and returns when its last frame is on its way."""
    from inference.worker.process import running_worker

    running_worker().complete(envelope)


@shared_task(name="inference.sweep_silent_engines", ignore_result=True)
def sweep_silent_engines() -> None:
    """Take the rows of engines that have gone silent away."""
    services.sweep_silent_engines()


@shared_task(name="inference.sweep_charges", ignore_result=True)
def sweep_charges() -> None:
    """End the Holds and Idempotency-Keys of API processes that died."""
    charges.sweep_charges()
