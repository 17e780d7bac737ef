"""A short run of `manage.py chaos`: whatever is killed, no promise is broken."""

import logging

import pytest

from tests.benchmarks.chaos.run import run_chaos


def test_a_short_run_breaks_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
    monkeypatch.setattr("tests.benchmarks.chaos.run.PAUSE_SECONDS", (0.5, 3.0))
    figures = run_chaos(minutes=0.4, seed=3, harvest_prompts=300, kills_at_least=3)
    assert figures["broken_promises"] == []
    assert sum(figures["kills"].values()) >= 3, figures["kills"]
    assert figures["answers"].get("completion: 200", 0) > 0, figures["answers"]
