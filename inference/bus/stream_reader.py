"""A connection of one's own that reads a stream or a list of Redis for ever, whatever becomes of Redis meanwhile."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Final

import structlog
from redis.exceptions import RedisError

from acsinfra.core.courier import LOST, RETRY_SECONDS, make_connection, open_connection

logger = structlog.get_logger(__name__)

BLOCK_MS: Final = 2000


class BlockingReader(ABC):
    """Waits for what comes under `key` and takes it, until it is closed; what it asks Redis for, its kind says.

    Once it `is_over` it waits for nothing more, and ends by itself. A Redis that is away, or that refuses what it is
    asked (its disk is full, say), is asked again.
    """

    def __init__(self, *, url: str, key: str, task_name: str) -> None:
        self.connection = make_connection(url)
        self.key = key
        self.is_over = False
        self._task = asyncio.create_task(self._run(), name=task_name)

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.connection.disconnect(nowait=True)

    @abstractmethod
    async def open(self) -> None:
        """The connection is new. Raises RedisError."""

    @abstractmethod
    async def read(self) -> Any:
        """Wait for what is new, for some seconds; None where nothing came. Raises RedisError."""

    @abstractmethod
    def take_all(self, answer: Any) -> None:
        """Take in what `read` returned."""

    async def ask(self, *arguments: str | int) -> Any:
        """The answer to one command. Raises RedisError."""
        await self.connection.send_command(*arguments, check_health=False)
        return await self.connection.read_response(disable_decoding=True)

    async def _run(self) -> None:
        failures = 0
        while not self.is_over:
            try:
                if not self.connection.is_connected:
                    await open_connection(self.connection)
                    await self.open()
                answer = await self.read()
                failures = 0
            except (*LOST, RedisError) as error:
                # Where it was refused, other answers may be on their way still.
                await self.connection.disconnect(nowait=True)
                if failures == 0:
                    logger.warning("The broker is away or refuses; a reader waits.", key=self.key, error=str(error))
                await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
                continue
            if answer:
                self.take_all(answer)


class StreamReader(BlockingReader):
    """Gives each entry of a stream to `take`. `open` sets `last_id` where it is empty; `read` gives XREAD's answer.

    An entry that cannot be read (of another version of this code) is logged and passed over.
    """

    last_id = ""

    @abstractmethod
    def take(self, fields: list[bytes]) -> None:
        """Take in the fields of an entry."""

    def take_all(self, answer: Any) -> None:
        """Take in the entries of one stream."""
        entries: list[tuple[bytes, list[bytes]]] = answer[0][1]
        self.last_id = entries[-1][0].decode()
        for _, fields in entries:
            if not fields:
                continue
            try:
                self.take(fields)
            except Exception:
                logger.exception("An entry of a stream could not be read.", key=self.key)
