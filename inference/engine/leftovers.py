"""Engine processes that a killed worker left behind: written down at start, ended at the next one.

`kill -9` of the process around an engine can leave vLLM's own processes running with gigabytes. Each front writes
the processes of its engine into a file of a state folder; the next start ends those whose front is gone.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

_END_SECONDS = 5.0


def record_engine_processes(state_folder: Path, *, engine_name: str, pids: Iterable[int]) -> Path:
    """Write down that this process has started the engine processes `pids`; returns the record's file."""
    state_folder.mkdir(parents=True, exist_ok=True)
    own = psutil.Process()
    record = {
        "front": [own.pid, own.create_time()],
        "engine": [[pid, psutil.Process(pid).create_time()] for pid in pids if psutil.pid_exists(pid)],
    }
    path = state_folder / f"{_file_stem(engine_name)}.{own.pid}.engine.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)
    return path


def forget_engine_processes(state_folder: Path, *, engine_name: str) -> None:
    """Remove this process's record after its engine ended as it should."""
    (state_folder / f"{_file_stem(engine_name)}.{os.getpid()}.engine.json").unlink(missing_ok=True)


def end_leftovers(state_folder: Path, *, engine_name: str) -> list[int]:
    """End what earlier fronts of this engine name left running; return the pids that were killed.

    A process is only killed when its start time is the recorded one and the front that recorded it is gone.
    """
    ended: list[int] = []
    for path in state_folder.glob(f"{_file_stem(engine_name)}.*.engine.json"):
        try:
            record = json.loads(path.read_text())
            front, engine = record["front"], record["engine"]
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if _find_process(*front) is not None:
            continue
        for pid, create_time in engine:
            ended += _end_tree(pid, create_time)
        path.unlink(missing_ok=True)
    return ended


def end_with_parent() -> None:
    """End this process, one of multiprocessing's, when the one that started it is gone: a kill -9 leaves nothing."""
    # Not the parent of the kernel's: that may be a fork server, which lives as long as any process it forked.
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _end_tree(pid: int, create_time: float) -> list[int]:
    process = _find_process(pid, create_time)
    if process is None:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [*process.children(recursive=True), process]
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(tree, timeout=_END_SECONDS)
        return [member.pid for member in tree]
    return []


def _find_process(pid: int, create_time: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        is_same = process.create_time() == create_time and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def _file_stem(engine_name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in engine_name)
