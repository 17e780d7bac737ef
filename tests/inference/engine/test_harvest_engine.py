"""The runner's engine: prompts in, residual streams out, with a bounded window."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inference.engine.environment import prepare_environment
from inference.engine.errors import RequestFault
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import ALL_LAYERS, assert_projected, assert_same_stream, make_prompt

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine


def test_every_prompt_comes_back_with_its_index_and_its_stream(
    harvest: "HarvestEngine", reference: ReferenceModel
) -> None:
    lengths = [1, 2, 511, 64, 33, 128, 300, 7, 200, 450, 31, 32]
    prompts = [(10 * index, make_prompt(length, seed=index)) for index, length in enumerate(lengths)]
    captured = {one.index: one for one in harvest.capture(prompts, ALL_LAYERS)}
    assert sorted(captured) == [index for index, _ in prompts]
    for index, token_ids in prompts:
        assert captured[index].token_ids == token_ids
        assert captured[index].array.dtype == np.float32
        assert_same_stream(captured[index].array.astype(np.float32), reference.read(token_ids))


def test_some_layers_only(harvest: "HarvestEngine", reference: ReferenceModel) -> None:
    prompt = make_prompt(90)
    (one,) = harvest.capture([(0, prompt)], (1, 3))
    assert_same_stream(one.array.astype(np.float32), reference.read(prompt), layers=(1, 3))


def test_the_streams_are_added_into_the_memory_that_the_caller_gives(
    harvest: "HarvestEngine", reference: ReferenceModel
) -> None:
    prompts = [(index, make_prompt(length, seed=index)) for index, length in enumerate([150, 1, 40, 200])]
    memory = np.full((4 * 400, 64), np.nan, np.float32)
    places = {0: (0, 150), 1: (600, 1), 2: (604, 40), 3: (800, 200)}

    def place(index: int) -> np.ndarray[Any, np.dtype[np.generic]]:
        start, rows = places[index]
        return memory[start : start + 4 * rows].reshape(4, rows, 64)

    for one in harvest.capture(prompts, ALL_LAYERS, place=place):
        assert np.shares_memory(one.array, memory)
    for index, token_ids in prompts:
        assert_same_stream(np.asarray(place(index), np.float32), reference.read(token_ids))
    written = np.zeros(len(memory), bool)
    for start, rows in places.values():
        written[start : start + 4 * rows] = True
    assert np.isnan(memory[~written]).all(), "nothing else is touched"


def test_only_projections_leave_the_device(harvest: "HarvestEngine") -> None:
    prompts = [(index, make_prompt(length, seed=index)) for index, length in enumerate([1, 130, 60, 300])]
    layers = (0, 2, 3)
    tokens = sum(len(token_ids) for _, token_ids in prompts)
    directions = np.random.default_rng(5).standard_normal((5, 64)).astype(np.float32)
    # Of any length: the squares of these are past float32, and below it.
    directions[1] *= np.float32(1e30)
    directions[2] *= np.float32(1e-30)

    def host_bytes() -> int:
        (worker,) = harvest.describe_workers()
        return int(worker["host_bytes"])

    before = host_bytes()
    whole = {one.index: one.array for one in harvest.capture(prompts, layers)}
    assert host_bytes() - before == tokens * len(layers) * 64 * 4
    before = host_bytes()
    projected = {one.index: one.array for one in harvest.capture(prompts, layers, directions=directions)}
    assert host_bytes() - before == tokens * len(layers) * len(directions) * 4

    for index, _ in prompts:
        assert_projected(projected[index], whole[index], directions)
    (worker,) = harvest.describe_workers()
    assert worker["requests"] == 0
    (unprojected,) = harvest.capture(prompts[:1], layers)
    assert unprojected.array.shape == (3, 1, 64)


def test_the_engine_goes_on_with_what_it_has_while_no_prompt_can_come(harvest: "HarvestEngine") -> None:
    finished = 0

    def corpus() -> Iterator[tuple[int, tuple[int, ...]] | None]:
        for index in range(6):
            yield index, make_prompt(20 + index)
            while finished <= index:
                yield None

    for finished, one in enumerate(harvest.capture(corpus(), (1,)), start=1):
        assert one.index == finished - 1
    assert finished == 6


def test_the_window_bounds_what_is_pulled(harvest: "HarvestEngine") -> None:
    pulled = 0

    def corpus() -> Iterator[tuple[int, tuple[int, ...]]]:
        nonlocal pulled
        for index in range(60):
            pulled += 1
            yield index, make_prompt(100, seed=index)

    most_ahead = done = 0
    for done, _ in enumerate(harvest.capture(corpus(), (2,), window_tokens=400), start=1):
        most_ahead = max(most_ahead, pulled - done)
    assert (pulled, done) == (60, 60)
    assert most_ahead <= 4


def test_stopping_and_closing_leave_nothing(harvest: "HarvestEngine") -> None:
    prompts = [(index, make_prompt(100, seed=index)) for index in range(40)]
    steps = 0

    def should_stop() -> bool:
        nonlocal steps
        steps += 1
        return steps > 3

    assert 0 < len(list(harvest.capture(prompts, (0,), should_stop=should_stop))) < 40
    closing = harvest.capture(prompts, (0,))
    next(closing)
    closing.close()  # type: ignore[attr-defined]
    assert [worker["requests"] for worker in harvest.describe_workers()] == [0]
    assert harvest._shelf.list_own() == []
    assert len(list(harvest.capture(prompts, (0,)))) == 40


def test_a_fault_names_the_prompt(harvest: "HarvestEngine") -> None:
    prompts = [(3, make_prompt(20)), (8, make_prompt(513)), (9, make_prompt(20))]
    with pytest.raises(RequestFault, match=r"^prompt 8: .*context"):
        list(harvest.capture(prompts, (0,)))
    with pytest.raises(RequestFault, match="layer"):
        list(harvest.capture(prompts[:1], (0, 4)))
    assert [worker["requests"] for worker in harvest.describe_workers()] == [0]


def test_the_environment_is_prepared_before_vllm_or_not_at_all(harvest: "HarvestEngine") -> None:
    assert harvest.facts.n_layers == 4
    with pytest.raises(RuntimeError, match="before its environment"):
        prepare_environment(checkpoint="anything", tensor_parallel_size=1, shares_machine=True)
