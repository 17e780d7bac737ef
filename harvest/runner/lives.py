"""A runner that outlives the death of its process: of a signal, out of memory, or with an engine that failed.

The engine is in the process that runs the jobs, as that is how values reach their shard without a copy. A prompt that
kills it takes that process along. So it is a child of one that only waits, and begins another in its place.
"""

import ctypes
import mmap
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import structlog

logger = structlog.get_logger(__name__)

# With which the child asks for another in its place: its engine failed, and nothing of it can be relied on.
ENGINE_FAILED: Final = 75
# One that dies again and again as soon as it begins is begun ever more slowly.
_SOON_SECONDS: Final = 10.0
_SOON_DEATHS_AT_ONCE: Final = 3
_PAUSE_AT_MOST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1


class PromptsInFlight:
    """Which prompts of the job that runs the engine holds, in memory that outlives the process that writes it.

    A prompt is its index in the corpus.
    """

    def __init__(self, n_prompts: int) -> None:
        """Make room for the indexes of `n_prompts` prompts, the most that a job may have."""
        self._marks = mmap.mmap(-1, n_prompts)

    def add(self, index: int) -> None:
        """Note that the engine is about to have this prompt."""
        self._marks[index] = 1

    def remove(self, index: int) -> None:
        """Note that the engine is done with this prompt."""
        self._marks[index] = 0

    def clear(self) -> None:
        """Note that the engine holds nothing."""
        self._marks[:] = bytes(len(self._marks))

    def indexes(self) -> tuple[int, ...]:
        """What it holds, or held when its process died."""
        return tuple(index for index, mark in enumerate(self._marks[:]) if mark)


@dataclass
class RunnerLife:
    """What the processes of one runner have in common, one after the other.

    `owner` holds the leases, so that a process finds the job that the one before it died with. `pid` is of the process
    that waits. `has_died` is True in a process that follows one that died.
    """

    in_flight: PromptsInFlight
    owner: uuid.UUID = field(default_factory=uuid.uuid4)
    pid: int = field(default_factory=os.getpid)
    has_died: bool = False


def begin_life(*, n_prompts: int) -> RunnerLife:
    """Return in a child of this process, and in another one whenever it dies; this process itself waits and ends.

    It ends with the exit code of a child that ended by itself. SIGTERM and SIGINT are passed on as SIGTERM. Call it
    before anything has begun threads or connections. A job has at most `n_prompts` prompts.
    """
    life = RunnerLife(PromptsInFlight(n_prompts))
    waiting = _Waiting()
    soon_deaths = 0
    while waiting.begin_child():
        began = time.monotonic()
        code = waiting.wait_for_child()
        if waiting.is_stopping or 0 <= code != ENGINE_FAILED:
            sys.exit(code if code >= 0 else 128 - code)
        logger.error("the runner's process died; another takes its place", code=code)
        life.has_died = True
        soon_deaths = soon_deaths + 1 if time.monotonic() - began < _SOON_SECONDS else 0
        if soon_deaths > _SOON_DEATHS_AT_ONCE:
            waiting.sleep(min(_PAUSE_AT_MOST_SECONDS, 2.0 ** (soon_deaths - _SOON_DEATHS_AT_ONCE - 1)))
    return life


class _Waiting:
    """The process that waits, with its child."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._child = 0
        self._usual = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}

    def begin_child(self) -> bool:
        """Fork; False in the child. Exits where a signal to stop came before."""
        own = os.getpid()
        # One that comes meanwhile is for the process that has noted its child, or has its usual handlers back.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._usual)
        if self.is_stopping:
            sys.exit(0)
        self._child = os.fork()
        if not self._child:
            _end_with(own)
            for number, handler in self._usual.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._usual)
        return bool(self._child)

    def wait_for_child(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it."""
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def sleep(self, seconds: float) -> None:
        """Wait, but not once it is to stop."""
        until = time.monotonic() + seconds
        while not self.is_stopping and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def _pass_on(self, _number: int, _frame: FrameType | None) -> None:
        self.is_stopping = True
        if self._child:
            os.kill(self._child, signal.SIGTERM)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` is gone. Only Linux can."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
