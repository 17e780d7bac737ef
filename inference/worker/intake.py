"""How an inference worker takes Completions from its model's queue: as many as it has room for, the oldest first."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from redis.exceptions import RedisError, ResponseError

from acsinfra.core.courier import BrokerAway, Courier
from inference.bus import keys
from inference.bus.envelope import Envelope, decode_envelope
from inference.bus.stream_reader import BLOCK_MS, BlockingReader
from inference.engine.errors import EngineRefused

logger = structlog.get_logger(__name__)

TAKE = "BLMPOP"

# A queue that has grown long is shared among the workers that come to it.
TAKEN_AT_ONCE = 16


async def refuse_old_broker(courier: Courier) -> None:
    """Raise EngineRefused where the broker lacks what the intake asks of it; one that won't say passes."""
    with suppress(ResponseError):
        if await courier.ask("COMMAND", "INFO", TAKE, patience=math.inf) == [None]:
            raise EngineRefused(
                f"The broker doesn't know {TAKE}: BROKER_URL must name a Valkey, or a Redis from 7.0 on."
            )


class Intake(BlockingReader):
    """Gives `on_envelope` what the queue of `model` has, while there is `room` for so many more.

    `note_room` says that there may be room again. A message that cannot be read (of another version of this code) is
    logged and passed over.
    """

    def __init__(
        self, *, url: str, model: str, room: Callable[[], int], on_envelope: Callable[[Envelope], object]
    ) -> None:
        self._room = room
        self._on_envelope = on_envelope
        self._may_have_room = asyncio.Event()
        self._client_id = 0
        super().__init__(url=url, key=keys.queue(model), task_name="intake")

    def note_room(self) -> None:
        """There may be room."""
        self._may_have_room.set()

    async def stop(self, courier: Courier) -> None:
        """Take no more; what Redis has handed out by then is taken still."""
        self.is_over = True
        self.note_room()
        # Else Redis would go on waiting for a message, and hand it out.
        with suppress(BrokerAway, RedisError):
            await courier.ask("CLIENT", "UNBLOCK", self._client_id)
        await asyncio.wait([self._task], timeout=2 * BLOCK_MS / 1000)
        await self.close()

    async def open(self) -> None:
        """Note by which number Redis knows the connection."""
        self._client_id = await self.ask("CLIENT", "ID")

    async def read(self) -> Any:
        """The next messages, once there is room for them."""
        while (room := self._room()) <= 0 and not self.is_over:
            self._may_have_room.clear()
            await self._may_have_room.wait()
        if self.is_over:
            return None
        at_once = min(room, TAKEN_AT_ONCE)
        return await self.ask(TAKE, BLOCK_MS // 1000, 1, self.key, "RIGHT", "COUNT", at_once)

    def take_all(self, answer: Any) -> None:
        """Hand the messages on."""
        for message in answer[1]:
            try:
                self._on_envelope(decode_envelope(message))
            except Exception:
                logger.exception("A message of the queue could not be read.", key=self.key)
