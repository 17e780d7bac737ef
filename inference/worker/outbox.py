"""How an inference worker's frames reach the API processes, and how much of an answer may be on its way."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from acsinfra.core.courier import BrokerAway, Courier
from inference.bus import keys
from inference.bus.frames import (
    PIECE_BYTES,
    RENEW_EVERY,
    WINDOW_BYTES,
    Batch,
    Body,
    Chunk,
    Frame,
    encode_batch,
)

logger = structlog.get_logger(__name__)

BATCH_FRAMES = 256
# An API process whose stream is missing gets this long to make it anew, as it does when Redis comes back empty.
GONE_AFTER_SECONDS = 3.0
LOOK_AGAIN_SECONDS = 0.25
IDLE_SECONDS = 60.0
# A client that reads nothing for this long has its answer broken off: the worker keeps answers no longer.
STALLED_SECONDS = 120.0


class ClientStalled(Exception):
    """The client has read nothing of its answer for STALLED_SECONDS."""


class Window:
    """What of one answer is on its way: at most WINDOW_BYTES, whatever the client's speed."""

    def __init__(self) -> None:
        self._sent = 0
        self._read = 0
        self._credit = asyncio.Event()

    def credit(self, read: int) -> None:
        """The client has read `read` bytes in all."""
        self._read = max(self._read, read)
        self._credit.set()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes more may be sent; raises ClientStalled."""
        while self._sent > self._read and self._sent - self._read + size > WINDOW_BYTES:
            self._credit.clear()
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    await self._credit.wait()
            except TimeoutError:
                raise ClientStalled from None
        self._sent += size


class Outboxes:
    """The frames that wait to go to each API process. `on_gone` hears of a process that no longer lives."""

    def __init__(self, *, courier: Courier, worker: str, on_gone: Callable[[str], None]) -> None:
        self._courier = courier
        self._worker = worker
        self._on_gone = on_gone
        self._numbers = itertools.count(1)
        self._frames: dict[str, deque[Frame]] = {}
        self._arrivals: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unsent = 0
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    def put(self, process: str, frame: Frame) -> None:
        """Send `frame` to API process `process`, behind those before it."""
        if process not in self._tasks:
            self._frames[process] = deque()
            self._arrivals[process] = asyncio.Event()
            self._tasks[process] = asyncio.create_task(self._carry(process), name=f"outbox-{process[:8]}")
        self._frames[process].append(frame)
        self._arrivals[process].set()
        self._unsent += 1
        self._all_sent.clear()

    async def send(self, process: str, frame: Body | Chunk, window: Window) -> None:
        """Send a frame of an answer as soon as its window has room; raises ClientStalled."""
        await window.take(len(frame.data))
        self.put(process, frame)

    async def send_body(self, process: str, request_id: str, body: bytes, window: Window) -> None:
        """Send a whole answer in pieces of at most PIECE_BYTES, each as its window has room."""
        for start in range(0, len(body), PIECE_BYTES):
            frame = Body(request_id, len(body), body[start : start + PIECE_BYTES])
            await self.send(process, frame, window)

    async def watch(self, busy: Callable[[], set[str]]) -> None:
        """Look for ever whether the processes that `busy` names still live."""
        while True:
            await asyncio.sleep(RENEW_EVERY.total_seconds())
            for process in busy():
                with suppress(BrokerAway):
                    if await self._courier.ask("EXISTS", keys.alive(process)) == 0 and not await self._is_back(process):
                        self._forget(process)

    async def drain(self, *, within: float) -> None:
        """Wait until all is sent, for at most `within` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._all_sent.wait()

    async def _is_back(self, process: str) -> bool:
        await asyncio.sleep(GONE_AFTER_SECONDS)
        return await self._courier.ask("EXISTS", keys.alive(process)) == 1

    def _note_sent(self, n_frames: int) -> None:
        self._unsent -= n_frames
        if self._unsent == 0:
            self._all_sent.set()

    def _forget(self, process: str) -> None:
        logger.warning("An API process is gone; its requests are stopped.", process=process)
        task = self._tasks.pop(process, None)
        self._note_sent(len(self._frames.pop(process, ())))
        self._arrivals.pop(process, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._on_gone(process)

    async def _carry(self, process: str) -> None:
        frames, arrival = self._frames[process], self._arrivals[process]
        while True:
            while frames:
                batch = _next_batch(frames)
                payload = encode_batch(Batch(self._worker, next(self._numbers), batch))
                try:
                    is_delivered = await self._deliver(process, payload)
                finally:
                    self._note_sent(len(batch))
                if not is_delivered:
                    self._forget(process)
                    return
            arrival.clear()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await arrival.wait()
            except TimeoutError:
                if not frames:
                    del self._tasks[process], self._frames[process], self._arrivals[process]
                    return

    async def _deliver(self, process: str, payload: bytes) -> bool:
        stream = keys.replies(process)
        missing_for = 0.0
        while missing_for <= GONE_AFTER_SECONDS:
            try:
                answer = await self._courier.ask("XADD", stream, "NOMKSTREAM", "*", "batch", payload, patience=600)
            except BrokerAway:
                return False
            except RedisError as error:
                # It may have no memory left; what is read makes room.
                logger.error("The broker refused an answer.", error=str(error))
                answer = None
            if answer is not None:
                return True
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            missing_for += LOOK_AGAIN_SECONDS
        return False


def _next_batch(frames: deque[Frame]) -> list[Frame]:
    batch: list[Frame] = []
    size = 0
    while frames and len(batch) < BATCH_FRAMES and size < PIECE_BYTES:
        frame = frames.popleft()
        size += len(frame.data) if isinstance(frame, (Body, Chunk)) else 0
        batch.append(frame)
    return batch
