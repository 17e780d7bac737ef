"""Start children, watch them, and end every one of them however this process ends."""

import contextlib
import fcntl
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import IO

import psutil

from acsinfra.quickstart.launcher import LaunchedProcess, Launcher, LauncherGone
from acsinfra.quickstart.processes import ProcessRecord, end_processes

SERVERS, WORKERS = 0, 1
# What is forked from the launcher, and its process among the children.
LAUNCHED_MODULE, LAUNCHER = "inference.engine.launched", "launcher"
# A log that has grown past this is put aside at the next start.
LOG_BYTES = 64 * 1024**2
PROJECT = Path(__file__).resolve().parent.parent.parent


class HomeInUse(Exception):
    """Another quickstart runs on this home."""


class ChildFailed(Exception):
    """A child ended by itself; the message has the end of its log."""


@dataclass
class Child:
    """A running child, its log, and where this run's part of the log begins."""

    record: ProcessRecord
    process: subprocess.Popen[bytes] | LaunchedProcess
    log: Path
    log_start: int

    @property
    def name(self) -> str:
        """What it is called in the logs and records."""
        return self.record.name

    def log_text(self) -> str:
        """Return what it has logged since it was started."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def check(self) -> None:
        """Raise ChildFailed if it has ended."""
        code = self.process.poll()
        if code is not None:
            lines = self.log_text().splitlines()[-40:]
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise ChildFailed("\n".join([f"{self.name} {how}. The end of {self.log}:", *lines]))


class Supervisor:
    """The children of one home folder.

    Only one at a time for a home: a lock file says so. What a killed predecessor left running is ended first. A
    guardian process ends the children when this process is killed. Logs go to `<home>/logs`, records of the children
    to `<home>/run`.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home.resolve()
        self.logs = self.home / "logs"
        self.run = self.home / "run"
        for folder in (self.logs, self.run):
            folder.mkdir(exist_ok=True)
        self.children: dict[str, Child] = {}
        self._launcher: Launcher | None = None
        self._lock = self._take_lock()
        self.leftovers = end_processes(self.run)
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "acsinfra.quickstart.processes", str(self.run)],
            stdin=subprocess.PIPE,
            cwd=PROJECT,
            start_new_session=True,
        )

    def _take_lock(self) -> IO[str]:
        lock = (self.home / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise HomeInUse(f"Another quickstart runs on {self.home}. Stop it, or name another --home.") from None
        return lock

    def spawn(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        tier: int = WORKERS,
        stop_signal: int = signal.SIGTERM,
        patience: float = 20,
        before_exec: Callable[[], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `command` in a process group of its own and put it on record.

        `before_exec` runs in the child, which has `pass_fds` too. It keeps bytecode, whatever `env` says: without,
        each start of an engine would compile vLLM's thousands of modules anew, a minute of CPU.
        """
        log, log_start = self._open_log(name)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_with_bytecode(env),
                cwd=cwd or PROJECT,
                start_new_session=True,
                preexec_fn=before_exec,
                pass_fds=pass_fds,
            )
        return self._put_on_record(name, process, log, log_start, tier=tier, stop=stop_signal, patience=patience)

    def start_launcher(self, *, env: Mapping[str, str], module: str = LAUNCHED_MODULE) -> None:
        """Begin to import vLLM for the engines of `spawn_engine`; returns at once. A second call changes nothing."""
        if self._launcher is not None:
            return
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "acsinfra.quickstart.launcher", module, str(theirs.fileno())]
        with theirs:
            self.spawn(LAUNCHER, command, env=env, tier=SERVERS, pass_fds=[theirs.fileno()])
        self._launcher = Launcher(ours)

    @property
    def is_launcher_ready(self) -> bool:
        """Whether `spawn_engine` would not wait for the launcher."""
        return self._launcher is None or self._launcher.is_ready()

    def spawn_engine(self, name: str, command: Sequence[str], *, env: Mapping[str, str]) -> Child:
        """`spawn` of a script of this project's that runs an engine; `command` begins with the script.

        A fork of the launcher where `start_launcher` was called and it lives, otherwise Python anew. It shares the
        machine with others.
        """
        if self._launcher is not None:
            log, log_start = self._open_log(name)
            with contextlib.suppress(LauncherGone):
                process = self._launcher.start(command, env=_with_bytecode(env), cwd=PROJECT, log=log)
                return self._put_on_record(name, process, log, log_start)
        return self.spawn(name, [sys.executable, *command], env=env)

    def _open_log(self, name: str) -> tuple[Path, int]:
        """The log of a child, and where it goes on."""
        log = self.logs / f"{name}.log"
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        log.touch()
        return log, log.stat().st_size

    def _put_on_record(
        self,
        name: str,
        process: subprocess.Popen[bytes] | LaunchedProcess,
        log: Path,
        log_start: int,
        *,
        tier: int = WORKERS,
        stop: int = signal.SIGTERM,
        patience: float = 20,
    ) -> Child:
        try:
            started = psutil.Process(process.pid).create_time()
        except psutil.NoSuchProcess:
            started = 0.0
        record = ProcessRecord(name, process.pid, started, tier, stop, patience)
        record.write(self.run)
        child = Child(record, process, log, log_start)
        self.children[name] = child
        return child

    def check(self) -> None:
        """Raise ChildFailed for a child that has ended by itself."""
        for child in self.children.values():
            child.check()

    def stop(self, name: str) -> None:
        """End one child: its stop signal, and SIGKILL past its patience."""
        child = self.children.pop(name)
        child.record.signal_group(child.record.stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(child.record.patience)
        self._forget(child)

    def kill(self, name: str) -> None:
        """End one child's group by SIGKILL."""
        self._forget(self.children.pop(name))

    def _forget(self, child: Child) -> None:
        child.record.signal_group(signal.SIGKILL)
        child.process.wait()
        child.record.file(self.run).unlink(missing_ok=True)

    def close(self) -> None:
        """End every child, the workers first, then give up the home. Calling it again changes nothing."""
        if self._lock.closed:
            return
        end_processes(self.run)
        for child in self.children.values():
            child.process.wait()
        if self._launcher is not None and LAUNCHER in self.children:
            self._launcher.close()
        self.children.clear()
        if self._guardian.stdin:
            self._guardian.stdin.close()
        self._guardian.wait()
        self._lock.close()


def _with_bytecode(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
