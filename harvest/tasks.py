"""The Celery tasks of Harvest jobs: "look", and the sweeps of the scheduler."""

from collections.abc import Mapping

import structlog
from celery import shared_task

from acsinfra.core.storage import StorageError
from budgets.spend import may_start_work
from harvest import services

logger = structlog.get_logger(__name__)

# What the scheduler runs, and every how many seconds.
SWEEPS: Mapping[str, float] = {"harvest.sweep": 5, "harvest.sweep_slowly": 60}


@shared_task(name=services.LOOK, ignore_result=True)
def look() -> None:
    """Run the jobs that wait; runs in a runner only, and returns when none waits."""
    from harvest.runner.worker import running_runner

    running_runner().run_waiting_jobs()


@shared_task(name="harvest.sweep", ignore_result=True)
def sweep() -> None:
    """Put jobs whose lease ran out back in line, fail those whose runner did not come, say "look" where jobs wait."""
    from harvest.selectors import models_with_waiting_jobs

    services.end_expired_leases()
    services.end_graces()
    if not may_start_work():
        return
    for model in models_with_waiting_jobs():
        services.tell_runners(model)


@shared_task(name="harvest.sweep_slowly", ignore_result=True)
def sweep_slowly() -> None:
    """Fail jobs that nobody took, end Holds whose job is gone, and delete files that are not needed."""
    services.fail_untaken()
    services.end_orphaned_harvest_holds()
    services.delete_old_files()
    try:
        services.delete_unneeded_files()
    except StorageError as error:
        logger.warning("could not delete files; the next sweep will", reason=str(error))
