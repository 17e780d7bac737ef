"""Captures and steering of other architectures, which hand the residual stream on in other ways than a Llama."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from inference.engine.errors import EngineRefused
from tests.inference.engine.architectures import (
    ARCHITECTURES,
    PARALLEL_STREAMS,
    STEERED_LAYER,
    STEERED_SPAN,
    Streams,
    make_and_read_with_huggingface,
    make_tiny_architecture,
    read_with_the_engine,
    relative_error,
    row_errors,
    run_apart,
)
from tests.inference.engine.reference import run_with_huggingface

# Each way once; that of the tiny Llama, delta and residual, is in every other test of the engine.
WAYS = ("gpt2", "gpt_neox", "cohere")
OTHERS = tuple(name for name in ARCHITECTURES if name not in WAYS)

WRONG = {
    "gemma3n": r"no unique list of 4 decoder blocks was found in Gemma3nForCausalLM",
    "a Llama that halves": r"which tensor of this model is its residual stream could not be decided: \{'sum': 0\.\d+, ",
}

type Read = dict[str, tuple[object, Streams | Exception]]


def read(root: Path, names: Sequence[str]) -> Read:
    """Return what HuggingFace and what the engine read of each architecture."""
    expected = run_with_huggingface(
        [partial(make_and_read_with_huggingface, root / name, ARCHITECTURES[name]) for name in names]
    )
    captured = run_apart([partial(read_with_the_engine, root / name) for name in names])
    return {name: (right, got) for name, right, got in zip(names, expected, captured, strict=True)}


def assert_like_huggingface(name: str, right: object, got: Streams | Exception) -> None:
    for streams in (right, got):
        if isinstance(streams, Exception):
            raise streams
    assert isinstance(right, Streams)
    assert isinstance(got, Streams)
    assert got.kind == ARCHITECTURES[name].kind
    assert relative_error(got.plain, right.plain) <= 1e-5
    assert relative_error(got.steered, right.steered) <= 1e-5
    # The vector went in where it belongs, and changed what comes after.
    first = STEERED_SPAN[0]
    assert relative_error(got.steered[:, :first], got.plain[:, :first]) <= 1e-5
    assert relative_error(got.steered[:STEERED_LAYER], got.plain[:STEERED_LAYER]) <= 1e-5
    assert relative_error(got.steered[STEERED_LAYER:, first:], got.plain[STEERED_LAYER:, first:]) > 0.1


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory, tiny_float32: Path) -> Read:
    """Return what was read of each way, and what became of two models that no rule is right for."""
    root = tmp_path_factory.mktemp("architectures")
    made: list[Callable[[], object]] = [
        partial(make_and_read_with_huggingface, root / name, ARCHITECTURES[name]) for name in WAYS
    ]
    made.append(partial(make_tiny_architecture, root / "gemma3n", PARALLEL_STREAMS))
    expected = run_with_huggingface(made)
    captured = run_apart(
        [
            *(partial(read_with_the_engine, root / name) for name in (*WAYS, "gemma3n")),
            partial(read_with_the_engine, tiny_float32, halved=True),
        ]
    )
    return dict(zip((*WAYS, *WRONG), zip((*expected, None), captured, strict=True), strict=True))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return read(tmp_path_factory.mktemp("architectures"), OTHERS)


@pytest.mark.parametrize("name", WAYS)
def test_captures_and_steering_are_those_of_huggingface(ways: Read, name: str) -> None:
    assert_like_huggingface(name, *ways[name])


@pytest.mark.parametrize("name", WRONG)
def test_one_that_would_be_wrong_is_refused_with_a_sentence(ways: Read, name: str) -> None:
    refused = ways[name][1]
    assert isinstance(refused, EngineRefused)
    assert re.search(WRONG[name], str(refused))


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_captures_and_steering_of_the_others_are_those_of_huggingface(others: Read, name: str) -> None:
    assert_like_huggingface(name, *others[name])


@pytest.mark.long
def test_all_are_served_in_bfloat16_too(tmp_path: Path) -> None:
    expected = run_with_huggingface(
        [partial(make_and_read_with_huggingface, tmp_path / name, ARCHITECTURES[name]) for name in ARCHITECTURES]
    )
    captured = run_apart([partial(read_with_the_engine, tmp_path / name, dtype="bfloat16") for name in ARCHITECTURES])
    errors = {}
    for name, right, got in zip(ARCHITECTURES, expected, captured, strict=True):
        for streams in (right, got):
            if isinstance(streams, Exception):
                raise streams
        assert isinstance(right, Streams)
        assert isinstance(got, Streams)
        # Not the largest: a row near the border between two experts may go to the other one.
        errors[name] = max(
            float(np.median(row_errors(got.plain, right.plain))),
            float(np.median(row_errors(got.steered, right.steered))),
        )
    # A bfloat16 has 8 bits of mantissa; HuggingFace's rows are float32's.
    assert max(errors.values()) < 0.02, errors
