"""What a run has in memory at once: windows of consecutive prompts, each read in whatever order suits the engine.

A window is some whole shards, or a part of one that is too large. Its values lie in one block of memory in the order
of the files, so that the engine writes them where a shard's bytes are taken from.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from harvest.runner.corpus import TokenisedPrompt
from harvest.runner.shards import ShardLayout

# Several, so that the engine reads into one while others are on their way to the storage.
WINDOWS_AT_ONCE: Final = 4
WAIT_SECONDS: Final = 0.1
type Block = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ShardPart:
    """Consecutive prompts of one shard; `is_first` and `is_last` say whether its file begins or ends with them."""

    layout: ShardLayout
    prompts: Sequence[TokenisedPrompt]
    is_first: bool
    is_last: bool

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return sum(map(self.layout.value_bytes, self.prompts))


@dataclass(frozen=True)
class Window:
    """Parts of shards whose values are in memory together, in the order of the files."""

    parts: tuple[ShardPart, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return sum(part.nbytes for part in self.parts)

    def prompts_to_read(self) -> list[TokenisedPrompt]:
        """Its prompts but the empty ones, the longest first: short ones fill what the long leave of a step."""
        prompts = [prompt for part in self.parts for prompt in part.prompts if len(prompt.token_ids)]
        return sorted(prompts, key=lambda prompt: -len(prompt.token_ids))


def plan_windows(
    layouts: Sequence[ShardLayout], *, leave_out: Collection[int] = (), bytes_at_most: int
) -> list[Window]:
    """The windows of a run: as many whole shards each as fit in `bytes_at_most`, or as many prompts of a larger one.

    Shards of the indexes `leave_out` are stored already. The others stay in the window that they were in without them.
    """
    windows: list[Window] = []
    parts: list[ShardPart] = []
    size = 0
    for layout in layouts:
        for part in _split(layout, bytes_at_most):
            if parts and size + part.nbytes > bytes_at_most:
                windows.append(Window(tuple(parts)))
                parts, size = [], 0
            parts.append(part)
            size += part.nbytes
    if parts:
        windows.append(Window(tuple(parts)))
    left = (Window(tuple(part for part in window.parts if part.layout.index not in leave_out)) for window in windows)
    return [window for window in left if window.parts]


def _split(layout: ShardLayout, bytes_at_most: int) -> list[ShardPart]:
    starts, size = [0], 0
    for at, prompt in enumerate(layout.prompts):
        nbytes = layout.value_bytes(prompt)
        if at > starts[-1] and size + nbytes > bytes_at_most:
            starts.append(at)
            size = 0
        size += nbytes
    ends = [*starts[1:], len(layout.prompts)]
    return [
        ShardPart(layout, layout.prompts[start:end], start == 0, end == len(layout.prompts))
        for start, end in zip(starts, ends, strict=True)
    ]


class WindowMemory:
    """Blocks of memory for windows, used again and again: at most `bytes_at_most`, or one larger block.

    Memory that was touched once is worth keeping, from job to job too: the system clears what is fresh, page by page.
    Blocks are taken in one thread and may be given back in another. `peak_bytes` is the most that was there at once.
    """

    def __init__(self, bytes_at_most: int) -> None:
        self._bytes_at_most = bytes_at_most
        self.window_bytes = bytes_at_most // WINDOWS_AT_ONCE
        self._free: list[Block] = []
        self._taken: dict[int, Block] = {}
        self.peak_bytes = 0
        self._given_back = threading.Condition()

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` bytes, or None while the others have to be given back first."""
        with self._given_back:
            fitting = [block for block in self._free if block.nbytes >= nbytes]
            # All of one size where they can be, so that any window fits where another was.
            fresh = max(nbytes, self.window_bytes) if nbytes else 0
            size = min((block.nbytes for block in fitting), default=fresh)
            if self._taken_bytes and self._taken_bytes + size > self._bytes_at_most:
                return None
            if fitting:
                at = next(index for index, block in enumerate(self._free) if block.nbytes == size)
                block = self._free.pop(at)
            else:
                # What is too small for this window gives way.
                while self._free and self._taken_bytes + self._free_bytes + size > self._bytes_at_most:
                    self._free.pop(0)
                block = np.empty(size, np.uint8)
            self._taken[id(block)] = block
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes + self._free_bytes)
            return block

    def give_back(self, block: Block) -> None:
        """Let a block be used again."""
        with self._given_back:
            self._free.append(self._taken.pop(id(block)))
            self._given_back.notify_all()

    def take_back_all(self) -> None:
        """Let every block be used again: the run that took them is over, and nothing writes into them."""
        with self._given_back:
            self._free += self._taken.values()
            self._taken.clear()

    def release(self) -> None:
        """Let the system have what is not taken."""
        with self._given_back:
            self._free.clear()

    def wait(self, seconds: float) -> None:
        """Return when a block was given back, or after `seconds`."""
        with self._given_back:
            self._given_back.wait(seconds)

    @property
    def _taken_bytes(self) -> int:
        return sum(block.nbytes for block in self._taken.values())

    @property
    def _free_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)


@dataclass
class OpenWindow:
    """A window with its memory, and how many of its prompts are still to come."""

    window: Window
    block: Block
    missing: int


class WindowReader:
    """Hands prompts to the engine window by window, says where each one's values go, and which windows are whole."""

    def __init__(
        self,
        windows: Sequence[Window],
        *,
        dtype: np.dtype[np.generic],
        memory: WindowMemory,
        wait: Callable[[], None],
    ) -> None:
        """Read `windows` into `memory`; `wait` is called again and again while nothing can go on without more of it."""
        self._windows, self._dtype, self._memory, self._wait = windows, dtype, memory, wait
        self._open: deque[OpenWindow] = deque()
        self._places: dict[int, tuple[OpenWindow, npt.NDArray[np.generic]]] = {}

    def prompts(self) -> Iterator[tuple[int, list[int]] | None]:
        """Index and ids of each prompt; None while the memory has to be given back first and the engine has work."""
        for window in self._windows:
            while (block := self._memory.take(window.nbytes)) is None:
                if self._places:
                    yield None
                else:
                    self._wait()
            to_read = window.prompts_to_read()
            opened = OpenWindow(window, block, len(to_read))
            self._open.append(opened)
            for prompt, array in self.arrays(opened):
                if len(prompt.token_ids):
                    self._places[prompt.index] = (opened, array)
            for prompt in to_read:
                yield prompt.index, prompt.token_ids.tolist()

    def place(self, index: int) -> npt.NDArray[np.generic]:
        """Where the values of prompt `index` go: [layers, tokens, columns]."""
        return self._places[index][1]

    def arrived(self, index: int) -> None:
        """Take note that the values of prompt `index` are in their place."""
        opened, _ = self._places.pop(index)
        opened.missing -= 1

    def first_missing(self) -> int | None:
        """The index of a prompt whose values never came; None when all are there."""
        return next(iter(self._places), None)

    def whole_windows(self) -> Iterator[OpenWindow]:
        """The windows that are whole by now, each once, in their order."""
        while self._open and not self._open[0].missing:
            yield self._open.popleft()

    def arrays(self, opened: OpenWindow) -> Iterator[tuple[TokenisedPrompt, npt.NDArray[np.generic]]]:
        """Each prompt of a window with its values, in the order of the files."""
        offset = 0
        for part in opened.window.parts:
            for prompt in part.prompts:
                end = offset + part.layout.value_bytes(prompt)
                yield prompt, opened.block[offset:end].view(self._dtype).reshape(part.layout.shape(prompt))
                offset = end
