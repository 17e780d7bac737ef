"""Work that an inference worker does beside Completions, on the same engine: apps to the right of this one bring it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inference.models import BaseModel

if TYPE_CHECKING:
    from inference.worker.engine_life import EngineLife


@dataclass(frozen=True)
class LentEngine:
    """What background work may use: the engine that `life` holds, which serves `model`.

    `decode` turns token ids into text, special tokens included. The engine takes `sequences_at_once`; what it is given
    beyond them waits in it, first come, first served, and Completions behind it.
    """

    model: BaseModel
    life: "EngineLife"
    decode: Callable[[Sequence[int]], str]
    sequences_at_once: int


class BackgroundWork(Protocol):
    """One kind of work in one worker. It is made, and all but `finish` are called, in the engine's event loop."""

    def look(self) -> None:
        """There may be new work."""

    def cancel(self, request_id: str) -> None:
        """Stop the request at once, if it runs here: an API process asks for it."""

    def stop_taking(self) -> None:
        """The worker stops: begin nothing more."""

    async def finish(self, *, within: float) -> None:
        """Return once nothing runs: what does not end by itself within so many seconds is put back untouched."""


@dataclass(frozen=True)
class Background:
    """A kind of work: the Celery queue by which a model's workers hear of it, and how it begins in a worker."""

    queue: Callable[[str], str]
    begin: Callable[[LentEngine], BackgroundWork]


_kinds: list[Background] = []


def register_background(*, queue: Callable[[str], str], begin: Callable[[LentEngine], BackgroundWork]) -> None:
    """Have every inference worker do this kind of work; for `AppConfig.ready`."""
    _kinds.append(Background(queue=queue, begin=begin))


def kinds_of_background() -> Sequence[Background]:
    """What is registered."""
    return tuple(_kinds)
