"""Two worker ranks: both steer, rank 0 captures, and neither keeps anything."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.wire import EngineOptions
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    assert_same_stream,
    captured_stream,
    make_prompt,
    make_request,
    make_values,
    make_vector,
    sequence_read,
    spell_out,
)


@pytest.fixture(scope="module")
def two_ranks(tiny_float32: Path) -> Iterator[EngineThread]:
    """Return an engine over two ranks, with chunks."""
    engine = EngineThread(
        EngineOptions(
            checkpoint=str(tiny_float32),
            dtype="float32",
            kv_cache_bytes=16 * 1024**2,
            max_num_seqs=16,
            tensor_parallel_size=2,
            extra_args={"max_num_batched_tokens": 64},
        ),
        name="tests-two-ranks",
    )
    yield engine
    engine.close()


def test_captures_and_steering_over_two_ranks(two_ranks: EngineThread, reference: ReferenceModel) -> None:
    assert [worker["rank"] for worker in two_ranks.describe_workers()] == [0, 1]
    vectors = (
        make_vector(make_values(1, HIDDEN), (1,), position_spans=((50, 80),)),
        make_vector(make_values(1, HIDDEN, seed=1), (2,), norm_match=True),
        make_vector(make_values(1, 2, HIDDEN, seed=2), (0,), position_indices=(95, 3)),
    )
    requests = [
        make_request(
            make_prompt(90 + index, seed=index),
            capture=ALL_LAYERS,
            steering=vectors if index % 2 else (),
            max_tokens=10,
        )
        for index in range(6)
    ]
    for one, answer in zip(requests, two_ranks.answer_all(requests), strict=True):
        sequence = sequence_read(one, answer)
        steering = [spell_out(vector, len(sequence)) for vector in one.steering]
        assert_same_stream(captured_stream(answer), reference.read(sequence, steering))
    deadline = time.monotonic() + 60
    while any(worker["requests"] for worker in two_ranks.describe_workers()):
        assert time.monotonic() < deadline
    assert [worker["steering_bytes"] > 0 for worker in two_ranks.describe_workers()] == [True, True]
