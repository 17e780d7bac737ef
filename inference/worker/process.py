"""An inference worker's process: one engine in an event loop's thread, and a Celery worker beside it.

The engine, the queue of Completions, their answers and the control stream live in one event loop, so that vLLM batches
what runs at once. Celery, in the main thread, hears that there may be background work, and the signals.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil
import structlog
import uvloop
from django.conf import settings

from acsinfra.core.courier import Courier
from inference.bus.frames import Cancel, Control
from inference.engine.environment import prepare_environment
from inference.engine.errors import EngineRefused
from inference.engine.fork_server import start_fork_server
from inference.engine.importing import without_collections
from inference.engine.leftovers import end_leftovers, forget_engine_processes, record_engine_processes
from inference.models import BaseModel
from inference.services import engine_options
from inference.tokenization import ModelTokenizer, load_tokenizer
from inference.wire import EngineOptions
from inference.worker.background import BackgroundWork, LentEngine, kinds_of_background
from inference.worker.completions import CompletionService
from inference.worker.control import ControlReader
from inference.worker.engine_life import EngineLife
from inference.worker.intake import Intake, refuse_old_broker
from inference.worker.registry import Registration

logger = structlog.get_logger(__name__)

ENGINE_STATE = settings.HOME / "engines"
DRAIN_SECONDS = 10.0
# After this an orderly end has failed.
STOP_SECONDS = 60.0


def requests_at_once(sequences: int) -> int:
    """How many Completions an engine of so many sequences is given: some wait in it.

    A sequence that ends is followed in the engine's next step only by one that is there already. Those that end in one
    step are a sixteenth where answers have 16 tokens, and half where they have two.
    """
    return sequences + max(1, sequences // 2)


class InferenceWorker:
    """The worker of one model in this process, between `start` and `stop`.

    `shares_machine` says that other work runs on the engine's CPUs.
    """

    def __init__(self, *, model: BaseModel, checkpoint: str, shares_machine: bool) -> None:
        self.model = model
        self._name = f"inference-{model.name}"
        self._options: EngineOptions = engine_options(model=model, checkpoint=checkpoint)
        self._tokenizer: ModelTokenizer = load_tokenizer(bytes(model.files.tokenizer_zstd))
        prepare_environment(
            checkpoint=checkpoint,
            tensor_parallel_size=model.tensor_parallel_size,
            shares_machine=shares_machine,
        )
        # Started within the engine's thread, it would lift that thread's block on signals (Python 3.12).
        resource_tracker.ensure_running()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="engine-loop", daemon=True)
        self._thread.start()
        self._service: CompletionService | None = None
        self._control: ControlReader | None = None
        self._intake: Intake | None = None
        self._courier: Courier | None = None
        self._life: EngineLife | None = None
        self._background: list[BackgroundWork] = []
        self._gone_watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.is_lost = False

    def start(self, registration: Registration) -> None:
        """Load the engine and listen; raises EngineRefused."""
        ended = end_leftovers(ENGINE_STATE, engine_name=self._name)
        if ended:
            logger.warning("An earlier engine was left running; it was ended.", pids=ended)
        self._await(self._start(registration))

    def begin_taking(self) -> None:
        """Take Completions from now on: whoever stops this process is heard."""
        self._loop.call_soon_threadsafe(self._begin_intake)

    def look(self) -> None:
        """Background work may have come."""
        for work in self._background:
            self._loop.call_soon_threadsafe(work.look)

    def stop_taking(self) -> None:
        """Begin nothing more; what runs goes on."""
        for work in self._background:
            self._loop.call_soon_threadsafe(work.stop_taking)
        asyncio.run_coroutine_threadsafe(self._stop_intake(), self._loop)

    def finish(self) -> None:
        """Return once every Completion has ended; past `settings.ENGINE_TIME_LIMIT` they end with an error.

        A SIGINT (a second one, by then) ends them at once. For the main thread.
        """
        service = self._service
        if service is not None:
            signal.signal(signal.SIGINT, lambda *_: self._loop.call_soon_threadsafe(service.abort_all))
            self._await(self._finish())

    def stop(self) -> None:
        """End the engine and the event loop, after the last frames have gone out."""
        self._await(self._stop())
        forget_engine_processes(ENGINE_STATE, engine_name=self._name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run_loop(self) -> None:
        # The engine's processes inherit this: a SIGTERM to the whole group or control group must not end the engine
        # under what it still has to finish. This process alone hears it, in its main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        self._loop.run_forever()

    def _await[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, registration: Registration) -> None:
        # Both import vllm, which takes seconds: the registration's heartbeats go on meanwhile.
        start_fork_server()
        with without_collections():
            from inference.engine.front import InferenceEngine

        async def start_engine() -> InferenceEngine:
            engine = await InferenceEngine.start(self._options, name=self._name)
            record_engine_processes(ENGINE_STATE, engine_name=self._name, pids=engine.process_ids)
            return engine

        self._courier = Courier(settings.BROKER_URL)
        await refuse_old_broker(self._courier)
        self._life = EngineLife(
            start=start_engine,
            on_live=registration.mark_live,
            on_dead=registration.mark_starting,
            on_lost=self._give_up,
        )
        service = CompletionService(
            worker=registration.worker,
            life=self._life,
            courier=self._courier,
            decode=self._tokenizer.decode,
            prompts_at_once=self._options.max_num_seqs,
            listening_since=lambda: self._control.listening_since if self._control is not None else 0.0,
            on_end=lambda: self._intake.note_room() if self._intake is not None else None,
        )

        def obey(message: Control) -> None:
            service.obey(message)
            if isinstance(message, Cancel):
                for work in self._background:
                    work.cancel(message.request_id)

        self._control = ControlReader(url=settings.BROKER_URL, model=self.model.name, on_message=obey)
        await self._control.listening.wait()
        await self._life.begin()
        self._gone_watch = asyncio.create_task(service.outboxes.watch(service.busy_processes), name="gone-watch")
        self._service = service
        lent = LentEngine(
            model=self.model,
            life=self._life,
            decode=self._tokenizer.decode,
            sequences_at_once=self._options.max_num_seqs,
        )
        self._background = [kind.begin(lent) for kind in kinds_of_background()]

    def _begin_intake(self) -> None:
        service = self._service
        if service is None or self._intake is not None or self._is_stopping:
            return
        at_once = requests_at_once(self._options.max_num_seqs)
        self._intake = Intake(
            url=settings.BROKER_URL,
            model=self.model.name,
            room=lambda: at_once - service.n_running,
            on_envelope=service.take,
        )

    async def _stop_intake(self) -> None:
        self._is_stopping = True
        if self._intake is not None and self._courier is not None:
            await self._intake.stop(self._courier)

    async def _finish(self) -> None:
        await self._stop_intake()
        if self._service is not None:
            # Without an engine nothing ends by itself.
            await self._service.finish(within=0 if self.is_lost else settings.ENGINE_TIME_LIMIT.total_seconds())

    async def _stop(self) -> None:
        for work in self._background:
            await work.finish(within=DRAIN_SECONDS)
        if self._service is not None:
            await self._service.outboxes.drain(within=DRAIN_SECONDS)
        if self._gone_watch is not None:
            self._gone_watch.cancel()
        if self._control is not None:
            await self._control.close()
        if self._life is not None:
            await self._life.end()
        if self._courier is not None:
            await self._courier.close()

    def _give_up(self) -> None:
        logger.error("The engine can't be started again; the worker ends.")
        self.is_lost = True
        os.kill(os.getpid(), signal.SIGTERM)


_worker: InferenceWorker | None = None


def run(*, model: BaseModel, checkpoint: str, shares_machine: bool) -> int:
    """Serve `model` until a SIGTERM or SIGINT; returns the process's exit code."""
    global _worker
    from inference.worker.celery_worker import run_celery_worker

    _worker = InferenceWorker(model=model, checkpoint=checkpoint, shares_machine=shares_machine)
    registration = Registration(model=model, on_removed=_end_without_model)
    code = _load(_worker, registration)
    if code is not None:
        # An engine that is loading can't be stopped, only ended, and its threads with it.
        registration.close()
        _end_now(code)
    try:
        try:
            run_celery_worker(_worker, registration)
        finally:
            # However Celery came to its end, nothing is begun from here on, and what runs is finished.
            registration.leave()
            _worker.stop_taking()
            _worker.finish()
    finally:
        registration.leave()
        watchdog = threading.Timer(STOP_SECONDS, _end_now, args=(1,))
        watchdog.daemon = True
        watchdog.start()
        _worker.stop()
        registration.close()
        watchdog.cancel()
    return 1 if _worker.is_lost else 0


def running_worker() -> InferenceWorker:
    """The worker of this process."""
    assert _worker is not None, "this task belongs to `manage.py inference`"
    return _worker


def _load(worker: InferenceWorker, registration: Registration) -> int | None:
    """Load the engine; returns the exit code where that was not to be."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        worker.start(registration)
    except KeyboardInterrupt:
        logger.info("Stopped while the engine was loading.", model=worker.model.name)
        return 0
    except EngineRefused as error:
        logger.error("The engine refused to serve.", model=worker.model.name, reason=str(error))
        return 1
    except Exception:
        logger.exception("The engine could not be started.", model=worker.model.name)
        return 1
    return None


def _end_without_model() -> None:
    logger.error("The model was removed; its worker ends.")
    os.kill(os.getpid(), signal.SIGTERM)


def _end_now(code: int) -> None:
    """End this process and all that it started, without waiting for anything."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    sys.stderr.flush()
    os._exit(code)
