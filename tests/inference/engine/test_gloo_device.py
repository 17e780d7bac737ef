"""An engine's process groups share one gloo device, so that one thread waits for the other ranks, not thirteen."""

from pathlib import Path

import pytest

from tests.inference.engine.conftest import EngineThread


def test_an_engine_of_one_rank_has_one_thread_that_waits_for_others(roomy: EngineThread) -> None:
    (worker,) = roomy.describe_workers()
    names = [path.read_text().strip() for path in Path(f"/proc/{worker['pid']}/task").glob("*/comm")]
    assert len(names) > 1
    assert names.count("gloo_tcp_loop") == 1


def test_an_interface_that_somebody_names_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    from inference.engine.gloo_device import share_gloo_device

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", ProcessGroupGloo)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    share_gloo_device()
    assert distributed_c10d.ProcessGroupGloo is ProcessGroupGloo
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    share_gloo_device()
    assert distributed_c10d.ProcessGroupGloo is not ProcessGroupGloo
