"""The runner's engine: prompts in, residual streams out, with a bounded window."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from inference.engine.environment import prepare_environment
from inference.engine.errors import RequestFault
from inference.wire import EngineOptions
from tests.inference.engine import conftest
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import ALL_LAYERS, assert_same_stream, make_prompt

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine


@pytest.fixture(scope="module")
def harvest(tiny_float32: Path) -> Iterator["HarvestEngine"]:
    """Return a harvest engine in this process, with chunks of 128 tokens and a cache for three long prompts."""
    conftest.prepare_once()
    from inference.engine.harvest import HarvestEngine

    engine = HarvestEngine.start(
        EngineOptions(
            checkpoint=str(tiny_float32),
            dtype="float32",
            kv_cache_bytes=48 * conftest.BLOCK_TOKENS * conftest.CACHE_BYTES_PER_TOKEN,
            max_num_seqs=32,
            extra_args={"max_num_batched_tokens": 128},
        ),
        name="tests-harvest",
    )
    yield engine
    engine.shutdown()


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
