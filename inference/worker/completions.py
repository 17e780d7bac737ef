"""What an inference worker does with one Completion: from its envelope to the frames of its answer."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from django.conf import settings
from redis.exceptions import RedisError

from acsinfra.core.courier import BrokerAway, Courier
from acsinfra.core.errors import ErrorCode
from inference.answers import AnswerBuilder, MisbehavedEngine, StreamShaper, engine_requests
from inference.bus import keys
from inference.bus.envelope import Envelope, read_work
from inference.bus.frames import Cancel, Chunk, Control, Credit, End, Fault, Final, Stopped, Taken
from inference.engine.activations import CapturedActivations
from inference.engine.errors import EngineDied, RequestFault
from inference.wire import CompletionWork, EngineDelta
from inference.worker.engine_life import EngineLife
from inference.worker.outbox import ClientStalled, Outboxes, Window
from inference.worker.whole import at_most, generate, make_whole_answer

if TYPE_CHECKING:
    from inference.engine.front import InferenceEngine

logger = structlog.get_logger(__name__)

# An answer within this time says itself that a worker has the request; nobody misses the word for seconds.
TAKEN_AFTER_SECONDS = 0.05
CANCELS_REMEMBERED = 10_000
ENDS_REMEMBERED = 10_000
# What was told to stop does within this time.
STOP_SECONDS = 10.0
# What a request has counted is left in Redis this often while it runs, for when this worker or its API process dies.
COUNT_EVERY_SECONDS = 1.0
COUNT_KEPT_SECONDS = 3600


@dataclass(eq=False)
class _Running:
    """A request that this worker has."""

    reply_to: str
    task: "asyncio.Task[None] | None" = None
    window: Window = field(default_factory=Window)
    taken: asyncio.TimerHandle | None = None
    is_aborted: bool = False
    is_answered: bool = False
    shaper: AnswerBuilder | StreamShaper | None = None
    counted: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> tuple[int, int]:
        """The prompts' tokens and those generated until now; none before the engine has the request."""
        return (0, 0) if self.shaper is None else self.shaper.counted

    def abort(self) -> None:
        """Nobody waits for the answer any more."""
        self.is_aborted = True
        if self.task is not None:
            self.task.cancel()


class CompletionService:
    """Runs the Completions of one worker; lives in the engine's event loop.

    `decode` turns token ids into text, special tokens included. `on_end` hears of each request that has ended.
    """

    def __init__(
        self,
        *,
        worker: str,
        life: EngineLife,
        courier: Courier,
        decode: Callable[[Sequence[int]], str],
        prompts_at_once: int,
        listening_since: Callable[[], float],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._life = life
        self._courier = courier
        self._decode = decode
        self._prompts_at_once = prompts_at_once
        self._listening_since = listening_since
        self._on_end = on_end
        self._running: dict[str, _Running] = {}
        self._cancels: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, tuple[str, Final]] = OrderedDict()
        self._counting: asyncio.TimerHandle | None = None
        self.outboxes = Outboxes(courier=courier, worker=worker, on_gone=self._abort_process)

    def busy_processes(self) -> set[str]:
        """The API processes that wait for answers from here."""
        return {running.reply_to for running in self._running.values()}

    @property
    def n_running(self) -> int:
        """The requests that this worker has."""
        return len(self._running)

    def take(self, envelope: Envelope) -> "asyncio.Task[None] | None":
        """Answer the Completion in `envelope`, in the task returned; None for one that this worker has already.

        The task ends when the last frame is on its way, and raises nothing.
        """
        request_id = envelope.request_id
        if request_id in self._running:
            # Given out twice. The API process sends again what it takes for lost: it has not heard who has it.
            self.outboxes.put(envelope.reply_to, Taken(request_id, self._worker))
            return None
        running = self._running[request_id] = _Running(envelope.reply_to)
        loop = asyncio.get_running_loop()
        # An answer that comes sooner says itself who has the request.
        running.taken = loop.call_later(
            TAKEN_AFTER_SECONDS, self.outboxes.put, running.reply_to, Taken(request_id, self._worker)
        )
        if self._counting is None:
            self._counting = loop.call_later(COUNT_EVERY_SECONDS, self._leave_counts)
        running.task = loop.create_task(self._serve(envelope, running))
        running.task.add_done_callback(lambda task: self._note_end(request_id, running, task))
        return running.task

    async def finish(self, *, within: float) -> None:
        """Return once nothing runs; what does not end by itself within so many seconds ends with an error."""
        if not await self._is_idle(within):
            self.abort_all()
            await self._is_idle(STOP_SECONDS)

    async def _is_idle(self, within: float) -> bool:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        return not tasks or not (await asyncio.wait(tasks, timeout=within))[1]

    def obey(self, message: Control) -> None:
        """Do what an API process asks."""
        running = self._running.get(message.request_id)
        match message:
            case Credit(read=read) if running is not None:
                running.window.credit(read)
            case Cancel(request_id=request_id):
                # What was sent again is perhaps still to come a second time.
                _remember(self._cancels, request_id, None, at_most=CANCELS_REMEMBERED)
                if running is not None:
                    running.abort()
                elif request_id in self._ended:
                    # Redis may have lost its last frame, and the API process waits for its count.
                    self.outboxes.put(*self._ended[request_id])

    def abort_all(self) -> None:
        """The worker's time is up: what still runs ends with an error."""
        for request_id, running in self._running.items():
            stopping = Fault(
                request_id, ErrorCode.ENGINE_ERROR.value, "The inference worker is stopping.", *running.tokens
            )
            self._finish(running, stopping)
            running.abort()

    def _note_end(self, request_id: str, running: _Running, task: "asyncio.Task[None]") -> None:
        """The request's task has ended, perhaps before its first step."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A request's end failed.", request_id=request_id, exc_info=error)
        if running.taken is not None:
            running.taken.cancel()
        if running.is_aborted and not running.is_answered:
            # Whoever asked for the end listens for the count alone.
            logger.info("A request was stopped: nobody waits for it.", request_id=request_id)
            self._finish(running, Stopped(request_id, *running.tokens))
        del self._running[request_id]
        self._on_end()

    async def _serve(self, envelope: Envelope, running: _Running) -> None:
        request_id = envelope.request_id
        if request_id in self._cancels:
            self._finish(running, Stopped(request_id, 0, 0))
            return
        seconds_left = envelope.deadline - time.time()
        if time.monotonic() - self._listening_since() < settings.ENGINE_TIME_LIMIT.total_seconds():
            self._look_for_mark(request_id, running)
        try:
            async with asyncio.timeout(max(0.0, seconds_left)):
                work = await read_work(envelope, self._courier)
                if work is None:
                    raise BrokerAway("The pieces of the work are gone.")
                await self._answer(work, running)
        except Exception as error:  # noqa: BLE001 - each has its answer, the unexpected ones too
            code, message = fault_of(error, request_id)
            self._finish(running, Fault(request_id, code.value, message, *running.tokens))

    async def _answer(self, work: CompletionWork, running: _Running) -> None:
        engine = await self._life.engine()
        try:
            await (self._stream if work.stream else self._whole)(work, engine, running)
        except EngineDied:
            self._life.report_dead(engine)
            raise
        self._finish(running, End(work.request_id, *running.tokens))

    async def _stream(self, work: CompletionWork, engine: "InferenceEngine", running: _Running) -> None:
        shaper = running.shaper = StreamShaper(work, self._decode)

        async def send(chunk: bytes | None) -> None:
            if chunk is not None:
                await self.outboxes.send(running.reply_to, Chunk(work.request_id, chunk), running.window)

        async def gain(prompt: int, item: EngineDelta | CapturedActivations) -> None:
            if isinstance(item, EngineDelta):
                await send(shaper.chunk(prompt, item))

        await generate(engine, engine_requests(work), gain, place=at_most(self._prompts_at_once))
        if work.include_usage:
            await send(shaper.usage_chunk())

    async def _whole(self, work: CompletionWork, engine: "InferenceEngine", running: _Running) -> None:
        builder = running.shaper = AnswerBuilder(work, self._decode)
        body = await make_whole_answer(work, engine, builder, place=at_most(self._prompts_at_once))
        await self.outboxes.send_body(running.reply_to, work.request_id, body, running.window)

    def _look_for_mark(self, request_id: str, running: _Running) -> None:
        """Abort the request if it was cancelled before this worker listened; costs the request no time."""

        def look(answer: asyncio.Future[object]) -> None:
            if not answer.cancelled() and answer.exception() is None and answer.result() == 1:
                running.abort()

        self._courier.ask("EXISTS", keys.cancelled(request_id)).add_done_callback(look)

    def _finish(self, running: _Running, frame: Final) -> None:
        """Send the last frame of a request, once; its count is in Redis before, in case nobody reads the frame."""
        if running.is_answered:
            return
        running.is_answered = True
        self._leave_count(frame.request_id, running, (frame.prompt_tokens, frame.completion_tokens))
        _remember(self._ended, frame.request_id, (running.reply_to, frame), at_most=ENDS_REMEMBERED)
        self.outboxes.put(running.reply_to, frame)

    def _leave_counts(self) -> None:
        self._counting = None
        for request_id, running in self._running.items():
            if not running.is_answered:
                self._leave_count(request_id, running, running.tokens)
        if self._running:
            self._counting = asyncio.get_running_loop().call_later(COUNT_EVERY_SECONDS, self._leave_counts)

    def _leave_count(self, request_id: str, running: _Running, tokens: tuple[int, int]) -> None:
        if tokens != running.counted:
            running.counted = tokens
            count = "{} {}".format(*tokens)
            self._courier.post("SET", keys.count(request_id), count, "EX", COUNT_KEPT_SECONDS, patience=60)

    def _abort_process(self, process: str) -> None:
        for running in self._running.values():
            if running.reply_to == process:
                running.abort()


def _remember[Value](known: OrderedDict[str, Value], request_id: str, value: Value, *, at_most: int) -> None:
    known[request_id] = value
    while len(known) > at_most:
        known.popitem(last=False)


def fault_of(error: Exception, request_id: str) -> tuple[ErrorCode, str]:
    """How a Completion ends that `error` ended."""
    match error:
        case TimeoutError():
            return ErrorCode.ENGINE_TIMEOUT, "The engine did not finish within its time limit."
        case ClientStalled():
            return ErrorCode.ENGINE_TIMEOUT, "The answer was not read."
        case EngineDied():
            return ErrorCode.ENGINE_ERROR, "The engine died under this request."
        case RequestFault() | MisbehavedEngine():
            logger.error("A request failed in the engine.", request_id=request_id, error=str(error))
            return ErrorCode.ENGINE_ERROR, f"The engine failed on this request: {error}"
        case BrokerAway() | RedisError():
            return ErrorCode.SERVICE_UNAVAILABLE, "The broker was away."
    logger.error("A request failed in the inference worker.", request_id=request_id, exc_info=error)
    return ErrorCode.ENGINE_ERROR, "The inference worker failed on this request."
