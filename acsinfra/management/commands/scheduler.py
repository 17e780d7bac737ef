"""`manage.py scheduler`: the sweeps that keep every promise when a part has died."""

import logging
import socket
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from celery import bootsteps, signals
from celery.beat import EmbeddedService
from celery.schedules import schedule
from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand

from acsinfra.celery import app
from acsinfra.core.checks import require_settings

QUEUE = "default"
# Celery writes three lines for each sweep, every few seconds.
QUIET_LOGGERS = ("celery.beat", "celery.worker.strategy", "celery.app.trace")


class BeatInAThread(bootsteps.StartStopStep):
    """Celery's beat inside the worker's process, with its times in memory: at a start, everything is due."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        self._beat: Any = EmbeddedService(parent.app, thread=True, scheduler_cls="celery.beat:Scheduler")
        super().__init__(parent, **options)

    def start(self, parent: Any) -> None:
        """Begin to send the sweeps."""
        self._beat.start()

    def stop(self, parent: Any) -> None:
        """Send no more."""
        self._beat.stop()


class Command(BaseCommand):
    """Send and run the sweeps of every app, until SIGTERM or Ctrl-C. Several schedulers do no harm."""

    help = "Run the scheduler: puts work whose runner died back in line, fails what waits too long, deletes files."

    def handle(self, *args: Any, **options: Any) -> None:
        require_settings(serves_http=False)
        signals.setup_logging.connect(_keep_logging, weak=False)
        for name in QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        app.conf.beat_schedule = {
            name: {"task": name, "schedule": schedule(seconds), "options": {"expires": seconds, "queue": QUEUE}}
            for name, seconds in _sweeps().items()
        }
        app.conf.broker_connection_max_retries = None
        app.steps["worker"].add(BeatInAThread)
        worker = app.Worker(
            hostname=f"scheduler@{socket.gethostname()}",
            pool="threads",
            concurrency=2,
            queues=[QUEUE],
            without_mingle=True,
            without_gossip=True,
            without_heartbeat=True,
            quiet=True,
            redirect_stdouts=False,
            loglevel=settings.LOG_LEVEL,
        )
        worker.start()


def _sweeps() -> Mapping[str, float]:
    """The tasks that each app names in `SWEEPS` of its `tasks` module, and every how many seconds they run."""
    sweeps: dict[str, float] = {}
    for config in apps.get_app_configs():
        name = f"{config.name}.tasks"
        if find_spec(name) is not None:
            sweeps |= getattr(import_module(name), "SWEEPS", {})
    return sweeps


def _keep_logging(**_: object) -> None:
    """Receive `setup_logging`, so that Celery leaves ours as it is."""
