"""The one engine of an inference worker, started again when it died."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from inference.engine.front import InferenceEngine

logger = structlog.get_logger(__name__)

WATCH_EVERY_SECONDS = 0.5
REVIVAL_TRIES = 3
REVIVAL_PAUSE_SECONDS = 5.0
SHUTDOWN_BEGINS_SECONDS = 0.2


class EngineLife:
    """Holds the engine that serves; `start` makes one.

    A dead engine is replaced once, however many requests report it; work that arrives meanwhile waits in `engine()`.
    `on_live` and `on_dead` hear of each change; `on_lost` of an engine that could not be started again.
    """

    def __init__(
        self,
        *,
        start: Callable[[], Awaitable["InferenceEngine"]],
        on_live: Callable[[], None],
        on_dead: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._start = start
        self._on_live, self._on_dead, self._on_lost = on_live, on_dead, on_lost
        self._engine: InferenceEngine | None = None
        self._is_there = asyncio.Event()
        self._revival: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first engine; raises what it raises, EngineRefused above all."""
        self._serve_with(await self._start())
        self._watch = asyncio.create_task(self._watch_over(), name="engine-watch")

    @property
    def is_serving(self) -> bool:
        """Whether an engine serves at this moment."""
        return self._engine is not None

    async def engine(self) -> "InferenceEngine":
        """The engine that serves, waited for while it is being started again."""
        while self._engine is None:
            await self._is_there.wait()
        return self._engine

    def report_dead(self, engine: "InferenceEngine") -> None:
        """`engine` died: start another, unless someone has said so before."""
        if engine is not self._engine:
            return
        self._engine = None
        self._is_there.clear()
        logger.error("The engine died; another is started.")
        self._on_dead()
        self._revival = asyncio.create_task(self._revive(engine), name="engine-revival")

    async def end(self) -> None:
        """Stop the engine for good."""
        for task in (self._watch, self._revival):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await _shut_down(engine)

    def _serve_with(self, engine: "InferenceEngine") -> None:
        self._engine = engine
        self._is_there.set()
        self._on_live()

    async def _revive(self, dead: "InferenceEngine") -> None:
        try:
            await _shut_down(dead)
        except Exception:
            logger.exception("What was left of the dead engine could not be ended.")
        for _ in range(REVIVAL_TRIES):
            try:
                self._serve_with(await self._start())
            except Exception:
                logger.exception("The engine could not be started again.")
                await asyncio.sleep(REVIVAL_PAUSE_SECONDS)
            else:
                return
        self._on_lost()

    async def _watch_over(self) -> None:
        # An engine that dies while nothing runs in it is noticed by nobody else.
        while True:
            await asyncio.sleep(WATCH_EVERY_SECONDS)
            if self._engine is not None and self._engine.is_dead:
                self.report_dead(self._engine)


async def _shut_down(engine: "InferenceEngine") -> None:
    """Shut `engine` down at once: its processes block the SIGTERM that vLLM would wait for (see `InferenceWorker`)."""
    pids = engine.process_ids
    shutdown = asyncio.create_task(engine.shutdown())
    # vLLM must know first that the end of its processes is meant.
    await asyncio.sleep(SHUTDOWN_BEGINS_SECONDS)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await shutdown
