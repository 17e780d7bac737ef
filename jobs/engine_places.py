"""Which sequences of Jobs are in the engine: those of the Jobs that were claimed first.

The engine takes all that it is given and serves it in that order. Were all Jobs' prompts given to it at once, a
Completion would wait behind hundreds of them, and the last prompts of a Job behind those of every later one.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

# Of so many places one stays free of Jobs, so that a Completion begins at once beside them.
ONE_FREE_OF: Final = 8


@dataclass(order=True)
class _Waiting:
    turn: int
    number: int
    sequences: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class EnginePlaces:
    """Places for sequences of Jobs in an engine that takes `sequences_at_once`; used in one event loop."""

    def __init__(self, sequences_at_once: int) -> None:
        self.total = sequences_at_once - sequences_at_once // ONE_FREE_OF
        self._free = self.total
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def taken(self, sequences: int, *, turn: int) -> AsyncGenerator[None]:
        """Wait for places and keep them for the block; the least `turn` has the first that are free.

        What needs more than there are gets all of them.
        """
        needed = min(sequences, self.total)
        await self._take(needed, turn)
        try:
            yield
        finally:
            self._give_back(needed)

    async def _take(self, needed: int, turn: int) -> None:
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Waiting(turn, next(self._numbers), needed, granted))
        self._let_in()
        try:
            await granted
        except asyncio.CancelledError:
            # It may have been granted just before.
            self._give_back(0 if granted.cancelled() else needed)
            raise

    def _give_back(self, places: int) -> None:
        self._free += places
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not first.granted.cancelled():
                if first.sequences > self._free:
                    return
                self._free -= first.sequences
                first.granted.set_result(None)
            heapq.heappop(self._waiting)
