"""An engine's process groups share one gloo device, so that one thread waits for the other ranks, not thirteen."""

from pathlib import Path

from tests.inference.engine.conftest import EngineThread


def test_an_engine_of_one_rank_has_one_thread_that_waits_for_others(roomy: EngineThread) -> None:
    (worker,) = roomy.describe_workers()
    names = [path.read_text().strip() for path in Path(f"/proc/{worker['pid']}/task").glob("*/comm")]
    assert len(names) > 1
    assert names.count("gloo_tcp_loop") == 1
