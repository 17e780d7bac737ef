"""Processes forked from one that has imported what takes them long.

Importing vLLM takes a process many seconds of CPU, and a quickstart has two that need it, an inference worker and a
runner. The launcher (`python -m acsinfra.quickstart.launcher MODULE FD`) imports MODULE once, while the servers start
and the checkpoint comes. What it is then asked for begins as its fork, with an environment, a log and a process group
of its own, and runs a script as `python SCRIPT …` would.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import psutil
from setproctitle import getproctitle, setproctitle

_LOOK_SECONDS: Final = 0.05


class LauncherGone(Exception):
    """The launcher has ended, and starts nothing more."""


@dataclass(frozen=True)
class _Start:
    """What the launcher is asked to start."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str


class Launcher:
    """This process's end of a launcher."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._is_ready = False
        self._is_gone = False

    def is_ready(self) -> bool:
        """Whether it has imported its module, or can't any more."""
        with self._lock:
            self._read_what_is_there()
            return self._is_ready or self._is_gone

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> "LaunchedProcess":
        """Run the Python script `argv[0]`; waits until the launcher has imported its module. Raises LauncherGone."""
        request = json.dumps(asdict(_Start(list(argv), dict(env), str(cwd), str(log))))
        with self._lock:
            if not self._is_gone:
                try:
                    self._connection.send_bytes(request.encode())
                    while (message := self._receive()).keys() != {"pid"}:
                        self._note(message)
                except OSError:
                    self._is_gone = True
                else:
                    return LaunchedProcess(self, message["pid"])
        raise LauncherGone

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process that it started, or minus the signal that ended it; None while it runs."""
        with self._lock:
            self._read_what_is_there()
            # Nobody can say how it ended any more.
            if self._is_gone and not _runs(pid):
                self._codes.setdefault(pid, -signal.SIGKILL)
            return self._codes.get(pid)

    def close(self) -> None:
        """Let it go; it ends, and what it started does not."""
        self._connection.close()

    def _read_what_is_there(self) -> None:
        try:
            while not self._is_gone and self._connection.poll():
                self._note(self._receive())
        except OSError:
            self._is_gone = True

    def _note(self, message: dict[str, int]) -> None:
        self._is_ready = True
        if "code" in message:
            self._codes[message["pid"]] = message["code"]

    def _receive(self) -> dict[str, int]:
        try:
            message: dict[str, int] = json.loads(self._connection.recv_bytes())
        except EOFError as error:
            raise OSError("the launcher has ended") from error
        return message


class LaunchedProcess:
    """A process that a launcher started, with what is used here of `subprocess.Popen`."""

    def __init__(self, launcher: Launcher, pid: int) -> None:
        self._launcher = launcher
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._launcher.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` past `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _runs(pid: int) -> bool:
    # A zombie has ended: where the first process of a container reaps nothing, it stays one for ever.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# In the launcher


def _serve(connection: Connection) -> _Start | None:
    """Start what is asked for until nobody asks any more; returns what to become, in each fork."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    usual = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    while True:
        ready = wait([connection, reads])
        if connection in ready:
            try:
                start = _Start(**json.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                return None
            pid = os.fork()
            # By both, so that the group is there for whoever knows the pid, and before the script begins.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, usual)
                os.close(reads)
                os.close(writes)
                connection.close()
                return start
            _say(connection, {"pid": pid})
        if reads in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reads, select.PIPE_BUF)
            _report_ends(connection)


def _report_ends(connection: Connection) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _say(connection, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(connection: Connection, message: Mapping[str, Any]) -> None:
    # Whoever asked may have gone; the next look at the connection sees it.
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def _become(start: _Start) -> None:
    """Be the process that was asked for."""
    log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    setproctitle(" ".join(start.argv))
    sys.argv = start.argv
    paths = [path for path in start.env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = [str(Path(start.argv[0]).resolve().parent), *paths]
    runpy.run_path(start.argv[0], run_name="__main__")


def main() -> None:
    """Be a launcher, or in its forks what it was asked for."""
    connection = Connection(int(sys.argv[2]))
    # It looks for where titles go from the environment, which must be the one of the start still.
    setproctitle(getproctitle())
    importlib.import_module(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    _say(connection, {})
    start = _serve(connection)
    if start is not None:
        _become(start)


if __name__ == "__main__":
    main()
