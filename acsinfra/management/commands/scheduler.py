"""`manage.py scheduler`: the sweeps that keep every promise when a part has died."""

import logging
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import structlog
from celery import beat
from celery.schedules import schedule
from django.apps import apps
from django.core.management.base import BaseCommand
from django.db import connections

from acsinfra.celery import app
from acsinfra.core.checks import require_settings
from acsinfra.core.errors import is_part_away

# The longest sleep: the schedule follows a clock that was set right.
LOOKS_EVERY_SECONDS = 5
# Celery's beat writes a line for each sweep, every few seconds.
QUIET_LOGGER = "celery.beat"

logger = structlog.get_logger(__name__)


class SweepsHere(beat.Scheduler):
    """Celery's schedule, with its times in memory, whose tasks run in threads of this process.

    The sweeps are why work goes on when a part is away: they need PostgreSQL, and no broker brings them. Each has a
    thread of its own, so that one that waits for such a part holds up no other.
    """

    # Celery would connect to the broker for it.
    producer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._threads = ThreadPoolExecutor(len(sweeps()), thread_name_prefix="sweep")
        self._runs: dict[str, Future[None]] = {}
        super().__init__(*args, **kwargs)

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **_: Any) -> None:
        """Run the entry's task, unless its last run goes on."""
        run = self._runs.get(entry.task)
        if run is None or run.done():
            self._runs[entry.task] = self._threads.submit(run_sweep, entry.task)
        else:
            logger.warning("a sweep takes longer than the time until its next", sweep=entry.task)

    def close(self) -> None:
        """Wait for the sweeps that run."""
        self._threads.shutdown()


class Command(BaseCommand):
    """Run the sweeps of every app, until SIGTERM or Ctrl-C. Several schedulers do no harm."""

    help = "Run the scheduler: puts work whose runner died back in line, fails what waits too long, deletes files."

    def handle(self, *args: Any, **options: Any) -> None:
        require_settings(serves_http=False)
        logging.getLogger(QUIET_LOGGER).setLevel(logging.WARNING)
        app.conf.beat_schedule = {name: due_at_once(name, seconds) for name, seconds in sweeps().items()}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        logger.info("the scheduler is ready")
        beat.Service(app, max_interval=LOOKS_EVERY_SECONDS, scheduler_cls=SweepsHere).start()


def sweeps() -> Mapping[str, float]:
    """The tasks that each app names in `SWEEPS` of its `tasks` module, and every how many seconds they run."""
    found: dict[str, float] = {}
    for config in apps.get_app_configs():
        name = f"{config.name}.tasks"
        if find_spec(name) is not None:
            found |= getattr(import_module(name), "SWEEPS", {})
    return found


def due_at_once(name: str, seconds: float) -> dict[str, Any]:
    """An entry of Celery's schedule for the task of this name: now, and every so many seconds."""
    return {"task": name, "schedule": schedule(seconds), "last_run_at": app.now() - timedelta(seconds=seconds)}


def run_sweep(name: str) -> None:
    """Run the task of this name; its failure is logged, and the next run makes up for it."""
    try:
        try:
            app.tasks[name]()
        finally:
            connections.close_all()
    except Exception as error:
        if is_part_away(error):
            logger.warning("a part is away; the next sweep will go on", sweep=name, reason=type(error).__name__)
        else:
            logger.exception("a sweep failed; the next will go on", sweep=name)
