"""How answers reach an API process: one stream, one reader, and an inbox for each request that waits."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from acsinfra.core.courier import Courier
from inference.bus import keys
from inference.bus.envelope import Posted
from inference.bus.frames import (
    CREDIT_EVERY,
    Batch,
    Body,
    Chunk,
    Credit,
    Final,
    Frame,
    Taken,
    decode_batch,
    encode_control,
)
from inference.bus.stream_reader import BLOCK_MS, StreamReader

READ_ENTRIES = 64
CONTROL_LENGTH = 10_000


def post_control(courier: Courier, model: str, message: msgspec.Struct, *, patience: float = math.inf) -> None:
    """Tell every inference worker of `model`; it is tried for `patience` seconds."""
    entry = ("c", encode_control(message))
    courier.post("XADD", keys.control(model), "MAXLEN", "~", CONTROL_LENGTH, "*", *entry, patience=patience)


class Inbox:
    """The frames of one request, in order, as its coroutine reads them."""

    def __init__(self, *, request_id: str, model: str, courier: Courier) -> None:
        self.request_id = request_id
        self.model = model
        self.worker: str | None = None
        # None until it is published; then sent once, and again whenever it was lost before a worker had it.
        self.posted: Posted | None = None
        self.sendings = 1
        self.published_at = time.monotonic()
        self._courier = courier
        self._frames: deque[Frame] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._read = 0
        self._credited = 0
        self._last: asyncio.Future[Final] | None = None

    @property
    def is_in_line(self) -> bool:
        """Whether it waits for a worker, by all that is known here, and its answer is still wanted."""
        return self.posted is not None and self.worker is None and self._last is None and not self._frames

    def accept(self, frame: Frame, *, worker: str) -> None:
        """Take in a frame of `worker`; what a second worker makes of the same request is not read."""
        if self.worker is None:
            self.worker = worker
        if worker == self.worker and not isinstance(frame, Taken):
            self.put(frame)

    def put(self, frame: Frame) -> None:
        """Take in a frame."""
        if self._last is not None:
            if isinstance(frame, Final) and not self._last.done():
                self._last.set_result(frame)
            return
        self._frames.append(frame)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> Frame:
        """The next frame. Reading is what lets the worker send more."""
        while True:
            frame = self.next_nowait()
            if frame is not None:
                return frame
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def skip_to_last(self) -> "asyncio.Future[Final]":
        """Read nothing more but the last frame, which has the request's count."""
        if self._last is None:
            self._last = asyncio.get_running_loop().create_future()
            frames, self._frames = self._frames, deque()
            for frame in frames:
                self.put(frame)
        return self._last

    def next_nowait(self) -> Frame | None:
        """The next frame, or None where it has not come yet."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if isinstance(frame, (Body, Chunk)):
            self._read += len(frame.data)
            if self._read - self._credited >= CREDIT_EVERY:
                self._credited = self._read
                post_control(self._courier, self.model, Credit(self.request_id, self._read))
        return frame

    def holds_chunk(self) -> bool:
        """Whether the next frame is there and is a chunk."""
        return bool(self._frames) and isinstance(self._frames[0], Chunk)


class ReplyReader(StreamReader):
    """Reads this API process's reply stream on a connection of its own, and trims what it has read."""

    def __init__(
        self,
        *,
        url: str,
        process: str,
        inboxes: dict[str, Inbox],
        grant_place: Callable[[str], None],
        renew: Callable[[], None],
    ) -> None:
        self._inboxes = inboxes
        self._grant_place = grant_place
        self._renew = renew
        self._numbers: dict[str, int] = {}
        self.connected_at = 0.0
        super().__init__(url=url, key=keys.replies(process), task_name="reply-reader")

    async def open(self) -> None:
        """Begin with all that is there."""
        self.last_id = self.last_id or "0"
        self._renew()
        self.connected_at = time.monotonic()

    async def read(self) -> Any:
        """The entries that are new; those read before are trimmed in the same round trip."""
        connection = self.connection
        trim = connection.pack_command("XTRIM", self.key, "MINID", "=", _after(self.last_id))
        read = connection.pack_command(
            "XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self.key, self.last_id
        )
        await connection.send_packed_command(b"".join([*trim, *read]), check_health=False)
        await connection.read_response(disable_decoding=True)
        return await connection.read_response(disable_decoding=True)

    def take(self, fields: list[bytes]) -> None:
        """Hand a place or the frames of an answer to the request that waits for it."""
        kind, content = fields[0], fields[1]
        if kind == b"place":
            self._grant_place(content.decode())
        elif kind == b"batch":
            batch: Batch = decode_batch(content)
            if batch.number <= self._numbers.get(batch.worker, 0):
                return
            self._numbers[batch.worker] = batch.number
            for frame in batch.frames:
                if inbox := self._inboxes.get(frame.request_id):
                    inbox.accept(frame, worker=batch.worker)


def _after(entry_id: str) -> str:
    milliseconds, _, number = entry_id.partition("-")
    return f"{milliseconds}-{int(number or 0) + 1}"
