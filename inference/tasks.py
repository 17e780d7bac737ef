"""What the scheduler runs for Inference."""

from collections.abc import Mapping

from celery import shared_task

from inference import charges, services

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"inference.sweep_silent_engines": 5, "inference.sweep_charges": 5}


@shared_task(name="inference.sweep_silent_engines", ignore_result=True)
def sweep_silent_engines() -> None:
    """Take the rows of engines that have gone silent away."""
    services.sweep_silent_engines()


@shared_task(name="inference.sweep_charges", ignore_result=True)
def sweep_charges() -> None:
    """End the Holds and Idempotency-Keys of API processes that died."""
    charges.sweep_charges()
