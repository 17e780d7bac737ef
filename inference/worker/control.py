"""What the API processes tell the inference workers of a model: cancels and credits."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from acsinfra.core.courier import LOST, RETRY_SECONDS, make_connection, open_connection
from inference.bus import keys
from inference.bus.frames import Control, decode_control

logger = structlog.get_logger(__name__)

BLOCK_MS = 2000
READ_ENTRIES = 256


class ControlReader:
    """Reads a model's control stream from now on, on a connection of its own."""

    def __init__(self, *, url: str, model: str, on_message: Callable[[Control], None]) -> None:
        self._connection = make_connection(url)
        self._stream = keys.control(model)
        self._on_message = on_message
        self._last_id = ""
        self.listening = asyncio.Event()
        self.listening_since = 0.0
        self._task = asyncio.create_task(self._run(), name="control-reader")

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._connection.disconnect(nowait=True)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._connection.is_connected:
                    await open_connection(self._connection)
                    if not self._last_id:
                        self._last_id = await self._newest_id()
                    self.listening_since = time.monotonic()
                    self.listening.set()
                messages = await self._read()
                failures = 0
            except LOST as error:
                await self._connection.disconnect(nowait=True)
                if failures == 0:
                    logger.warning("The broker is away; cancels wait for it.", error=str(error))
                await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
                continue
            for message in messages:
                self._on_message(message)

    async def _newest_id(self) -> str:
        entries = await self._ask("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        return str(entries[0][0].decode()) if entries else "0"

    async def _read(self) -> list[Control]:
        answer = await self._ask(
            "XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self._stream, self._last_id
        )
        if not answer:
            return []
        entries = answer[0][1]
        self._last_id = entries[-1][0].decode()
        return [decode_control(fields[1]) for _, fields in entries if fields]

    async def _ask(self, *arguments: str | int) -> Any:
        await self._connection.send_command(*arguments, check_health=False)
        return await self._connection.read_response(disable_decoding=True)
