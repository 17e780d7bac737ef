"""The Celery worker of a runner's process: the solo pool, so that the engine lives in the main thread."""

import logging
from typing import Any, Final

import structlog
from celery import bootsteps, signals
from celery.worker import state
from django.conf import settings

from acsinfra.celery import app
from harvest.runner.worker import RunnerRegistration, running_runner
from harvest.services import runner_queue

logger = structlog.get_logger(__name__)

# How often an idle runner looks by itself, whatever became of the messages.
LOOK_SECONDS: Final = 2.0
QUIET_LOGGERS: Final = ("celery.worker.strategy", "celery.app.trace")


class LookOften(bootsteps.StartStopStep):
    """Has the runner look every few seconds while it is connected to the broker.

    With the Redis transport Celery's timer is its event loop's, so a look runs in the main thread, between messages.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Begin to look."""
        self._looks = parent.timer.call_repeatedly(LOOK_SECONDS, running_runner().run_waiting_jobs)

    def stop(self, parent: Any) -> None:
        """Look no more: the connection was lost, or the worker stops."""
        self._looks.cancel()


def is_told_to_stop() -> bool:
    """Whether Celery's signal handlers have seen a SIGTERM or SIGINT."""
    # They hold an exit code, which is 0 for a SIGTERM.
    flags: list[object] = [state.should_stop, state.should_terminate]
    return any(flag is not None and flag is not False for flag in flags)


def run_celery_worker(registration: RunnerRegistration) -> None:
    """Take "look" messages of the runner's model, and look every few seconds, until a SIGTERM or SIGINT."""
    # Logging is set up already; a receiver of this signal keeps Celery from doing it again.
    signals.setup_logging.connect(_keep_logging, weak=False)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)

    app.steps["consumer"].add(LookOften)
    app.conf.broker_connection_max_retries = None
    model = registration.engine.base_model.name
    worker = app.Worker(
        hostname=f"{registration.engine.pk}@{registration.engine.host}",
        pool="solo",
        queues=[runner_queue(model)],
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,
        quiet=True,
        redirect_stdouts=False,
        loglevel=settings.LOG_LEVEL,
    )
    logger.info("the runner takes jobs", model=model)
    worker.start()


def _keep_logging(**_: object) -> None:
    """Receive `setup_logging` and leave all as it is."""
