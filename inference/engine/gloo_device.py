"""One gloo device for all process groups of an engine's process.

vLLM 0.32 makes thirteen gloo groups even for one rank, and torch gives each a device of its own, whose thread wakes a
hundred times a second: an idle engine would take 2 to 3 % of a core, and a busy one that computes on all cores would
be interrupted 1,300 times a second. Groups may share a device: gloo is made for it.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


def share_gloo_device() -> None:
    """Have the gloo process groups that this process makes from now on share one device.

    Where somebody names its interface (GLOO_SOCKET_IFNAME), which only torch's own devices follow, they stay as torch
    makes them.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    distributed_c10d.ProcessGroupGloo = _GroupOnSharedDevice


@cache
def _shared_device() -> Any:
    return ProcessGroupGloo.create_default_device()


class _GroupOnSharedDevice(ProcessGroupGloo):
    """A group as torch's `new_group` and `init_process_group` make it, on the shared device."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [_shared_device()]
        super().__init__(store, rank, size, options)
