"""From the frames of a Completion to its HTTP answer, whole or streamed."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from acsinfra.core.errors import ApiError, ErrorCode
from budgets.models import Hold
from inference.bus.api import Bus, Count
from inference.bus.frames import Body, Chunk, End, Fault
from inference.bus.places import Place
from inference.bus.replies import Inbox
from inference.charges import Payer, end_hold, hold_for
from inference.wire import CompletionWork

# Chunks that wait already are sent together, up to about this much.
JOINED_BYTES = 64 * 1024


class Exchange:
    """A Completion between its place in the key's line and its last byte; `end` it in every case.

    `usage` is (prompt tokens, completion tokens) as the engine counted them, once the answer is whole or broke off.
    Whatever the end, its Hold ends with it, by that count or by the one that the engine gives when it is stopped.
    """

    def __init__(self, bus: Bus, work: CompletionWork) -> None:
        self._bus = bus
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._place: Place | None = None
        self._inbox: Inbox | None = None
        self._hold: Hold | None = None
        self._is_over = False
        self.request_id = work.request_id
        self.usage: Count | None = None
        self.error_code = ""

    async def begin(self, *, payer: Payer, at_once: int, queued: int) -> None:
        """Get in the payer's line, hold the tokens, wait for the place, then publish the work.

        The Hold is taken while the request may still have to wait: a Budget that is full shows at once.
        Raises ApiError (`429 queue_full` and `budget_exceeded`, `504 engine_timeout`) and BrokerAway.
        """
        async with self._deadline():
            self._place = await self._bus.places.claim(
                key=payer.line, request_id=self.request_id, at_once=at_once, queued=queued
            )
            self._hold = await hold_for(self._work, payer=payer, holder=self._bus.process)
            await self._place.granted
            self._inbox = await self._bus.send(self._work)

    def has_begun(self, error: ApiError) -> bool:
        """Whether work had begun when the exchange, not yet ended, came to `error`."""
        if self._inbox is None or self._inbox.worker is None:
            return False
        return not (error.code is ErrorCode.SERVICE_UNAVAILABLE and self.usage == (0, 0))

    async def next(self) -> Body | Chunk | End:
        """The next frame of the answer; raises ApiError where the answer is or breaks off with an error."""
        assert self._inbox is not None
        # A frame that is there already needs no timer.
        frame = self._inbox.next_nowait()
        if frame is None:
            async with self._deadline():
                frame = await self._inbox.next()
        if isinstance(frame, (Fault, End)):
            self._is_over = True
            if isinstance(frame, End) or frame.is_counted:
                self.usage = frame.prompt_tokens, frame.completion_tokens
        if isinstance(frame, Fault):
            raise frame.error()
        assert isinstance(frame, (Body, Chunk, End))
        return frame

    def more_chunks(self, first: Chunk) -> list[Chunk]:
        """`first` and the chunks behind it that are there already."""
        assert self._inbox is not None
        chunks, size = [first], len(first.data)
        while size < JOINED_BYTES and self._inbox.holds_chunk():
            frame = self._inbox.next_nowait()
            assert isinstance(frame, Chunk)
            chunks.append(frame)
            size += len(frame.data)
        return chunks

    def end(self) -> None:
        """Give the place back and end the Hold; an answer that is not whole is stopped in the engine.

        From another thread, such as the one in which Django closes the response of a page, it is done in the loop.
        """
        if not _runs_in(self._loop):
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.end)
            return
        place, self._place = self._place, None
        hold, self._hold = self._hold, None
        inbox, self._inbox = self._inbox, None
        if place is not None:
            self._bus.places.release(place)
        if inbox is not None and self._is_over:
            self._bus.close_inbox(inbox, is_over=True)
        if hold is not None:
            ending = _end_hold(self._bus, hold, inbox, usage=self.usage, is_over=self._is_over)
            self._bus.detach(ending, name=f"hold-{self.request_id}")

    def __del__(self) -> None:
        # A response that was cancelled on its way to Django is never closed, only dropped.
        if (self._place is not None or self._hold is not None) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end)

    def _deadline(self) -> "_Deadline":
        return _Deadline(self._work.deadline - time.time())


def _runs_in(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def _end_hold(bus: Bus, hold: Hold, inbox: Inbox | None, *, usage: Count | None, is_over: bool) -> None:
    """End the Hold by `usage`, or by what a worker says or has left, where the answer broke off without a count."""
    count = usage
    if inbox is not None and usage is None:
        count = await (bus.left_count(inbox.request_id) if is_over else bus.stop(inbox))
    await end_hold(hold, count=count, bus=bus)


class _Deadline:
    """`asyncio.timeout` that raises `504 engine_timeout`."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(max(0.0, seconds))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._timeout.__aexit__(*raised)  # type: ignore[arg-type]
        except TimeoutError:
            raise ApiError(ErrorCode.ENGINE_TIMEOUT, "The engine did not finish within its time limit.") from None


async def answer_whole(exchange: Exchange) -> HttpResponseBase:
    """The answer as one JSON object; a large one is passed on piece by piece as the client reads it."""
    first = await exchange.next()
    assert isinstance(first, Body)
    if len(first.data) == first.total:
        await exchange.next()
        exchange.end()
        return HttpResponse(first.data, content_type="application/json")
    response = StreamingHttpResponse(_Parts(exchange, _pieces(exchange, first)), content_type="application/json")
    response["Content-Length"] = str(first.total)
    return response


async def answer_stream(exchange: Exchange) -> HttpResponseBase:
    """The answer as server-sent events; returns, with the status, once the first chunk is there."""
    first = await exchange.next()
    response = _EventStream(exchange, _events(exchange, first))
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


class _EventStream(StreamingHttpResponse):
    """A stream of events, which knows the code of the error that it ended with."""

    def __init__(self, exchange: Exchange, events: AsyncGenerator[bytes]) -> None:
        super().__init__(_Parts(exchange, events), content_type="text/event-stream")
        self._exchange = exchange

    @property
    def error_code(self) -> str:
        return self._exchange.error_code


class _Parts:
    """The parts of a streamed answer, whose end is the exchange's: Django calls `close` on every way out."""

    def __init__(self, exchange: Exchange, parts: AsyncGenerator[bytes]) -> None:
        self._exchange = exchange
        self._parts = parts

    def __aiter__(self) -> "_Parts":
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._parts)

    def close(self) -> None:
        self._exchange.end()


async def _pieces(exchange: Exchange, first: Body) -> AsyncGenerator[bytes]:
    frame: Body | Chunk | End = first
    while not isinstance(frame, End):
        yield frame.data
        # An error from here on cuts the body short of its Content-Length: the server closes the connection.
        frame = await exchange.next()
    exchange.end()


async def _events(exchange: Exchange, first: Body | Chunk | End) -> AsyncGenerator[bytes]:
    frame = first
    try:
        while isinstance(frame, Chunk):
            yield b"".join(b"data: " + chunk.data + b"\n\n" for chunk in exchange.more_chunks(frame))
            frame = await exchange.next()
    except ApiError as error:
        exchange.error_code = error.code.value
        exchange.end()
        yield b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
        return
    exchange.end()
    yield b"data: [DONE]\n\n"
