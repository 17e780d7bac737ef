"""What a run has in memory: windows that hold files in order, read in any order, within a bound."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.runner.shards import ShardLayout, lay_out_shards
from harvest.runner.windows import Window, WindowMemory, WindowReader, plan_windows
from tests.harvest.runner.test_shards import prompts_of

FLOAT32 = np.dtype(np.float32)


def layouts_of(lengths: list[int], shard_size: int) -> list[ShardLayout]:
    return lay_out_shards(prompts_of(lengths), shard_size=shard_size, n_layers=2, n_columns=3, dtype="F32")


def shards_in(window: Window) -> list[int]:
    return [part.layout.index for part in window.parts]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 2_000))
def test_windows_hold_every_prompt_once_in_the_order_of_the_files(
    lengths: list[int], shard_size: int, bytes_at_most: int
) -> None:
    layouts = layouts_of(lengths, shard_size)
    windows = plan_windows(layouts, bytes_at_most=bytes_at_most)
    parts = [part for window in windows for part in window.parts]
    assert [prompt.index for part in parts for prompt in part.prompts] == list(range(len(lengths)))
    for window in windows:
        # Past the bound only with one prompt's values, which have to be in memory together.
        with_values = [p for part in window.parts for p in part.prompts if len(p.token_ids)]
        assert window.nbytes <= bytes_at_most or len(with_values) == 1
        read = window.prompts_to_read()
        assert [len(p.token_ids) for p in read] == sorted((len(p.token_ids) for p in with_values), reverse=True)
    for layout in layouts:
        own = [part for part in parts if part.layout is layout]
        assert [part.is_first for part in own] == [True] + [False] * (len(own) - 1)
        assert [part.is_last for part in own] == [False] * (len(own) - 1) + [True]
        # A shard that fits is never cut.
        assert len(own) == 1 or sum(part.nbytes for part in own) > bytes_at_most


def test_what_is_stored_already_leaves_the_other_windows_as_they_were() -> None:
    layouts = layouts_of([10] * 12, 2)
    whole = plan_windows(layouts, bytes_at_most=2 * 480)
    assert [shards_in(window) for window in whole] == [[0, 1], [2, 3], [4, 5]]
    left = plan_windows(layouts, leave_out={0, 1, 3}, bytes_at_most=2 * 480)
    assert [shards_in(window) for window in left] == [[2], [4, 5]]


def test_memory_is_used_again_and_bounded() -> None:
    memory = WindowMemory(100)
    first, second = memory.take(60), memory.take(13)
    assert first is not None
    assert second is not None
    assert (first.nbytes, second.nbytes) == (60, 25), "a quarter of it at least, for any window to fit"
    assert memory.take(20) is None
    memory.give_back(first)
    again = memory.take(50)
    assert again is first
    assert memory.take(20) is None
    memory.give_back(second)
    memory.give_back(first)
    large = memory.take(500)
    assert large is not None, "one block larger than the bound is there alone"
    assert memory.take(1) is None
    memory.give_back(large)
    assert memory.take(30) is large
    memory.give_back(large)
    memory.release()
    assert memory.take(30) is not large
    assert memory.peak_bytes == 500


class Reading:
    """A reader over windows of two shards, and an engine that finishes the shortest prompts first."""

    def __init__(self, lengths: list[int], *, memory_bytes: int) -> None:
        self.layouts = layouts_of(lengths, 2)
        self.memory = WindowMemory(memory_bytes)
        windows = plan_windows(self.layouts, bytes_at_most=self.memory.window_bytes)
        self.reader = WindowReader(windows, dtype=FLOAT32, memory=self.memory, wait=self.wait)
        self.waits = 0
        self.on_its_way: list[Any] = []
        self.files: dict[int, np.ndarray[Any, Any]] = {}

    def wait(self) -> None:
        self.waits += 1
        self.memory.give_back(self.on_its_way.pop(0))

    def run(self, in_flight: int) -> None:
        prompts: Iterator[tuple[int, list[int]] | None] = self.reader.prompts()
        running: list[tuple[int, list[int]]] = []
        is_over = False
        while running or not is_over:
            while not is_over and len(running) < in_flight:
                following = next(prompts, "over")
                if following == "over":
                    is_over = True
                elif following is None:
                    assert running, "the engine is idle: the reader must wait and not say so"
                    break
                else:
                    running.append(following)  # type: ignore[arg-type]
            if not running:
                break
            running.sort(key=lambda one: len(one[1]))
            index, ids = running.pop(0)
            self.reader.place(index)[...] = np.array(ids, np.float32)[None, :, None]
            self.reader.arrived(index)
            for opened in self.reader.whole_windows():
                self.files |= {p.index: array.copy() for p, array in self.reader.arrays(opened)}
                self.on_its_way.append(opened.block)


@pytest.mark.parametrize("in_flight", [1, 3, 100])
def test_values_come_out_in_the_order_of_the_files_whatever_the_engine_finishes_first(in_flight: int) -> None:
    lengths = [3, 1, 9, 4, 0, 7, 2, 2, 8, 0, 0, 5, 6]
    reading = Reading(lengths, memory_bytes=1_000)
    reading.run(in_flight)
    assert list(reading.files) == list(range(len(lengths)))
    for index, array in reading.files.items():
        assert array.shape == (2, lengths[index], 3)
        assert (array == (np.arange(lengths[index]) + 100 * index)[None, :, None]).all()
    assert reading.waits, "a storage that never is ready makes the engine wait"
    assert reading.memory.peak_bytes <= 1_000


def test_memory_that_is_given_back_wakes_who_waits() -> None:
    memory = WindowMemory(40)
    for _ in range(3):
        memory.take(10)
    block = memory.take(10)
    assert block is not None
    threading.Timer(0.05, memory.give_back, (block,)).start()
    memory.wait(30)
    assert memory.take(10) is block


def test_a_run_that_ended_early_leaves_the_next_one_all_memory() -> None:
    memory = WindowMemory(40)
    taken = [memory.take(10) for _ in range(4)]
    assert memory.take(10) is None
    memory.take_back_all()
    again = [memory.take(10) for _ in range(4)]
    assert {id(block) for block in again} == {id(block) for block in taken}
    assert memory.take(10) is None
    assert memory.peak_bytes == 40
