"""An engine in a process of its own, which may die of what it reads: what kills a worker is found with it."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Final, Self

from inference.engine.errors import EngineRefused
from inference.engine.fork_server import process_context
from inference.engine.leftovers import end_with_parent
from inference.wire import EngineOptions

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.2
type Prompts = Sequence[tuple[int, Sequence[int]]]


class TrialStopped(Exception):
    """It was told to stop before the prompts were read."""


class TrialEngine:
    """Reads prompts and throws them away; loads at the first ones, and anew after each death. Use it in a `with`.

    `layers` are captured meanwhile, as in a Harvest job. Call `environment.prepare_environment` before.
    """

    def __init__(
        self, options: EngineOptions, *, name: str, layers: Sequence[int], should_stop: Callable[[], bool]
    ) -> None:
        self._options, self._name, self._layers = options, name, tuple(layers)
        self._should_stop = should_stop
        # No fork of this process: it must share nothing with this one, least of all a GPU's state that a fault spoiled.
        self._context = process_context()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def can_read(self, prompts: Prompts) -> bool:
        """Whether the engine lives through these prompts of token ids, read together.

        Raises EngineRefused when it cannot be loaded, and TrialStopped.
        """
        if self._connection is None and not self._start():
            raise EngineRefused("the engine did not start for a trial of prompts")
        assert self._connection is not None
        try:
            self._connection.send([(index, list(token_ids)) for index, token_ids in prompts])
        except OSError:
            self.close()
            return False
        return self._answers()

    def close(self) -> None:
        """End its process."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.join()
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> bool:
        self._connection, theirs = self._context.Pipe()
        process = self._context.Process  # type: ignore[attr-defined]
        self._process = process(target=_read, args=(theirs, self._options, self._name, self._layers))
        self._process.start()
        theirs.close()
        return self._answers()

    def _answers(self) -> bool:
        """Wait for its word that it is through; False when it died instead."""
        assert self._connection is not None
        assert self._process is not None
        try:
            while not (ready := wait([self._connection, self._process.sentinel], _LOOK_SECONDS)):
                if self._should_stop():
                    raise TrialStopped
            if self._connection in ready:
                with contextlib.suppress(EOFError, OSError):
                    self._connection.recv()
                    return True
        except TrialStopped:
            self.close()
            raise
        self.close()
        return False


def _read(connection: Connection, options: EngineOptions, name: str, layers: tuple[int, ...]) -> None:
    """Be the process: say when the engine is loaded, and after each prompts that it lived through."""
    end_with_parent()
    try:
        from inference.engine.harvest import HarvestEngine

        engine = HarvestEngine.start(options, name=name)
        connection.send(True)
        while True:
            for _ in engine.capture(connection.recv(), layers):
                pass
            connection.send(True)
    except (EOFError, BrokenPipeError):
        code = 0
    except Exception:
        logger.exception("an engine failed in a trial of prompts")
        code = 1
    # Not Python's own end: it first goes through all that torch and vllm have left, for seconds.
    os._exit(code)
