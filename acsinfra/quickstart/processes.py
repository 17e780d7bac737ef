"""Processes on record: a file for each, so that whoever comes later can end what an earlier start left behind.

A record names a process by its pid and its start time, because a pid alone may belong to another process by now. The
guardian (`python -m acsinfra.quickstart.processes FOLDER`) waits for its standard input to close, which happens when
the process that holds the other end exits or is killed, and then ends everything on record in FOLDER.
"""

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

# How long a process may take from SIGKILL to its end: the kernel frees an engine's memory first.
ORPHAN_SECONDS = 10


@dataclass(frozen=True)
class ProcessRecord:
    """One child: the leader of its own process group.

    Children of a higher `tier` are ended first: the workers before the database and the broker that they need.
    `patience` is how many seconds it has between `stop_signal` and SIGKILL.
    """

    name: str
    pid: int
    started: float
    tier: int
    stop_signal: int
    patience: float

    def file(self, folder: Path) -> Path:
        """Where the record stands in `folder`."""
        return folder / f"{self.name}.json"

    def write(self, folder: Path) -> None:
        """Put the record on disk, whole or not at all."""
        partial = folder / f".{self.name}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(self.file(folder))

    def is_running(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        return is_running(self.pid, self.started, within=1)

    def signal_group(self, number: int) -> None:
        """Send a signal to every process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def is_running(pid: int, started: float, *, within: float) -> bool:
    """Whether process `pid` runs and started at `started` (Unix time) or up to `within` seconds from it.

    The kernel counts start times in hundredths, from a boot time that may be adjusted a little. A zombie does not run,
    though its number is still taken: a container whose first process reaps nothing keeps it for ever.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < within
    except psutil.NoSuchProcess:
        return False


def read_records(folder: Path) -> list[ProcessRecord]:
    """Return what is on record in `folder`."""
    records = []
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError, TypeError, OSError):
            records.append(ProcessRecord(**json.loads(file.read_text())))
    return records


def end_processes(folder: Path) -> list[str]:
    """End every recorded process that still runs, tier by tier, and forget the records. Returns their names."""
    records = read_records(folder)
    running = [record for record in records if record.is_running()]
    for tier in sorted({record.tier for record in running}, reverse=True):
        _end([record for record in running if record.tier == tier])
    orphaned_groups = {record.pid for record in records if record not in running}
    if orphaned_groups:
        _end_orphans(orphaned_groups, home=folder.parent)
    for record in records:
        record.file(folder).unlink(missing_ok=True)
    return [record.name for record in running]


def _end(records: list[ProcessRecord]) -> None:
    started = time.monotonic()
    for record in records:
        record.signal_group(record.stop_signal)
    waiting = list(records)
    while waiting:
        time.sleep(0.02)
        for record in list(waiting):
            if not record.is_running():
                waiting.remove(record)
            elif time.monotonic() - started > record.patience:
                record.signal_group(signal.SIGKILL)
    # A leader that has gone may have left members of its group behind.
    for record in records:
        record.signal_group(signal.SIGKILL)


def _end_orphans(groups: set[int], *, home: Path) -> None:
    """End what a dead leader left in its group, such as an engine's own processes, and wait until it has ended.

    A group's number may have come to belong to others by now, so only what holds a file of the home open: its log.
    (Environments are no proof: programs that change their title overwrite them.)
    """
    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) in groups and any(
                Path(file.path).is_relative_to(home) for file in process.open_files()
            ):
                process.kill()
                ended.append(process)
    deadline = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < deadline and any(
        is_running(process.pid, process.create_time(), within=1) for process in ended
    ):
        time.sleep(0.02)


def guard(folder: Path) -> None:
    """Wait until the other end of standard input is gone, then end what is on record in `folder`."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    end_processes(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
