"""The scheduler's own loop: what is due runs in its threads, whatever else is away."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import beat
from celery.schedules import schedule
from django.db import InterfaceError
from structlog.testing import capture_logs

from acsinfra.celery import app
from acsinfra.management.commands import scheduler as command
from acsinfra.management.commands.scheduler import SweepsHere, due_at_once, run_sweep

SOON = 0.01


class Sweep:
    """A task that says when it runs, and runs until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs = 0
        self.began, self.may_end = threading.Event(), threading.Event()
        self._error = error

    def __call__(self) -> None:
        self.runs += 1
        self.began.set()
        assert self.may_end.wait(60)
        if self._error:
            raise self._error


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Return the one task that there is, and lead every connection to a broker nowhere."""
    sweep = Sweep()
    monkeypatch.setattr(app, "tasks", {"tests.sweep": sweep})
    monkeypatch.setattr(app.conf, "broker_url", "redis://127.0.0.1:1/0")
    return sweep


@pytest.fixture
def service(sweep: Sweep) -> Iterator[Any]:
    """Return Celery's beat as the scheduler has it, with that task due now and every hundredth of a second."""
    app.conf.beat_schedule = {"tests.sweep": due_at_once("tests.sweep", SOON)}
    service = beat.Service(app, scheduler_cls=SweepsHere)
    yield service
    sweep.may_end.set()
    service.sync()
    app.conf.beat_schedule = {}


def test_a_sweep_is_due_at_the_start_and_needs_no_broker(sweep: Sweep, service: Any) -> None:
    service.scheduler.tick()
    assert sweep.began.wait(60)


def test_a_sweep_runs_once_at_a_time(sweep: Sweep, service: Any) -> None:
    entry: Any = service.scheduler.schedule["tests.sweep"]
    service.scheduler.apply_async(entry)
    assert sweep.began.wait(60)
    service.scheduler.apply_async(entry)
    service.scheduler.apply_async(entry)
    assert sweep.runs == 1
    sweep.may_end.set()
    service.scheduler._runs["tests.sweep"].result(60)
    assert sweep.runs == 1
    service.scheduler.apply_async(entry)
    service.scheduler._runs["tests.sweep"].result(60)
    assert sweep.runs == 2


def test_sweeps_that_wait_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {name: Sweep() for name in command.sweeps()}
    monkeypatch.setattr(app, "tasks", waiting)
    app.conf.beat_schedule = {name: due_at_once(name, 60) for name in waiting}
    service: Any = beat.Service(app, scheduler_cls=SweepsHere)
    try:
        while not service.scheduler.tick():
            pass
        assert all(sweep.began.wait(60) for sweep in waiting.values())
    finally:
        for sweep in waiting.values():
            sweep.may_end.set()
        service.sync()
        app.conf.beat_schedule = {}


def test_a_stop_waits_for_the_sweep_that_runs(sweep: Sweep, service: Any) -> None:
    service.scheduler.tick()
    assert sweep.began.wait(60)
    stop = threading.Thread(target=service.sync)
    stop.start()
    stop.join(0.2)
    assert stop.is_alive()
    sweep.may_end.set()
    stop.join(60)
    assert not stop.is_alive()
    assert service.scheduler._runs["tests.sweep"].done()


@pytest.mark.parametrize(
    ("error", "level"), [(InterfaceError("the connection is closed"), "warning"), (KeyError("a fault"), "error")]
)
def test_a_sweep_that_fails_is_logged_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, level: str
) -> None:
    sweep = Sweep(error)
    sweep.may_end.set()
    monkeypatch.setattr(app, "tasks", {"tests.sweep": sweep})
    with capture_logs() as logs:
        run_sweep("tests.sweep")
    assert [(line["log_level"], line["sweep"]) for line in logs] == [(level, "tests.sweep")]


def test_a_sweep_waits_its_seconds_between_two_runs() -> None:
    entry = due_at_once("tests.sweep", 5.0)
    assert entry["schedule"] == schedule(5.0)
    is_due, seconds = entry["schedule"].is_due(entry["last_run_at"])
    assert is_due
    assert 0 < seconds <= 5
    is_due, seconds = entry["schedule"].is_due(app.now())
    assert not is_due
    assert 3 < seconds <= 5
    assert command.sweeps()
