"""The Celery tasks of Jobs: "look", and the sweeps of the scheduler."""

from collections.abc import Mapping

from celery import shared_task

from jobs import services

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"jobs.sweep": 5, "jobs.sweep_slowly": 60}


@shared_task(name=services.LOOK, ignore_result=True)
def look() -> None:
    """Have this inference worker look for Jobs."""
    from inference.worker.process import running_worker

    running_worker().look()


@shared_task(name="jobs.sweep", ignore_result=True)
def sweep() -> None:
    """End what can't go on, put Jobs whose lease ran out back in line, and say "look" where Jobs wait."""
    from jobs.selectors import models_with_waiting_jobs

    services.end_forgotten_cancels()
    services.end_expired_leases()
    services.fail_jobs_of_switched_off_models()
    for model in models_with_waiting_jobs():
        services.tell_workers(model)


@shared_task(name="jobs.sweep_slowly", ignore_result=True)
def sweep_slowly() -> None:
    """Erase results whose time is over, and end Holds whose Job is gone."""
    while services.erase_expired_results() == services.SWEEP_BATCH:
        pass
    services.end_orphaned_job_holds()
