"""What the API processes tell the inference workers of a model: cancels and credits."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from inference.bus import keys
from inference.bus.frames import Control, decode_control
from inference.bus.stream_reader import BLOCK_MS, StreamReader

READ_ENTRIES = 256


class ControlReader(StreamReader):
    """Reads a model's control stream from now on, on a connection of its own."""

    def __init__(self, *, url: str, model: str, on_message: Callable[[Control], None]) -> None:
        self._on_message = on_message
        self.listening = asyncio.Event()
        self.listening_since = 0.0
        super().__init__(url=url, key=keys.control(model), task_name="control-reader")

    async def open(self) -> None:
        """Begin with what comes from now on, or where it was lost."""
        if not self.last_id:
            newest = await self.ask("XREVRANGE", self.key, "+", "-", "COUNT", 1)
            self.last_id = newest[0][0].decode() if newest else "0"
        self.listening_since = time.monotonic()
        self.listening.set()

    async def read(self) -> Any:
        """The entries that are new."""
        return await self.ask("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self.key, self.last_id)

    def take(self, fields: list[bytes]) -> None:
        """Hand the message on."""
        self._on_message(decode_control(fields[1]))
