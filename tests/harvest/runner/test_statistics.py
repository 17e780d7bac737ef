"""Statistics equal NumPy's in float64, whatever the pieces they came in."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from harvest.runner.statistics import BLOCK_ROWS, RunningStatistics

Array = np.ndarray[Any, np.dtype[np.float32]]


def rows(n_tokens: int, *, seed: int = 0, mean: float = 0.0, spread: float = 1.0) -> Array:
    """Values [3 layers, tokens, 16] in float32."""
    values = np.random.default_rng(seed).normal(mean, spread, (3, n_tokens, 16))
    return values.astype(np.float32)


def statistics_of(pieces: list[Array]) -> RunningStatistics:
    sums = RunningStatistics(3, 16)
    for piece in pieces:
        sums.add(torch.from_numpy(piece))
    return sums


def assert_equals_numpy(sums: RunningStatistics, values: Array) -> None:
    """Within 1e-5 of |value| + std, the contract's bound."""
    stats = load(sums.to_stats_file())
    exact = values.astype(np.float64)
    mean, std = exact.mean(axis=1), exact.std(axis=1)
    norm = np.sqrt((exact**2).sum(axis=2)).mean(axis=1)
    assert stats["count"].tolist() == [values.shape[1]]
    assert (np.abs(stats["mean"] - mean) <= 1e-5 * (np.abs(mean) + std)).all()
    assert (np.abs(stats["std"] - std) <= 1e-5 * (np.abs(std) + std)).all()
    assert (np.abs(stats["mean_token_norm"] - norm) <= 1e-5 * norm).all()
    assert {name: stats[name].dtype.name for name in stats} == {
        "mean": "float32",
        "std": "float32",
        "mean_token_norm": "float32",
        "count": "int64",
    }


@pytest.mark.parametrize("n_tokens", [1, 2, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 1_000])
def test_one_pass_equals_numpy(n_tokens: int) -> None:
    values = rows(n_tokens)
    assert_equals_numpy(statistics_of([values]), values)


@pytest.mark.parametrize(("mean", "spread"), [(1_000.0, 1.0), (-3e4, 0.5), (1e-6, 1e-6), (1e6, 1e5)])
def test_a_mean_that_dwarfs_the_deviation_loses_no_digits(mean: float, spread: float) -> None:
    values = rows(5_000, mean=mean, spread=spread)
    assert_equals_numpy(statistics_of(np.array_split(values, 37, axis=1)), values)


def test_massive_first_tokens_are_taken_as_they_are() -> None:
    values = rows(640)
    values[:, ::64, 3] = 1.3e4
    assert_equals_numpy(statistics_of(np.array_split(values, 10, axis=1)), values)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_pieces_and_merges_change_nothing(lengths: list[int], cut: int, seed: int) -> None:
    values = rows(sum(lengths), seed=seed, mean=seed % 7 - 3)
    pieces = np.split(values, np.cumsum(lengths)[:-1], axis=1)
    merged = statistics_of(pieces[:cut])
    merged.merge(statistics_of(pieces[cut:]))
    assert_equals_numpy(merged, values)


def test_the_state_comes_back_exactly() -> None:
    sums = statistics_of([rows(100), rows(7, seed=1)])
    again = RunningStatistics.from_bytes(sums.to_bytes())
    assert (again.count, again.to_stats_file()) == (107, sums.to_stats_file())
    for name in ("mean", "m2", "norm_sum"):
        assert torch.equal(getattr(again, name), getattr(sums, name))


def test_no_token_gives_zeros() -> None:
    empty = RunningStatistics(3, 16)
    empty.add(torch.empty(3, 0, 16))
    empty.merge(RunningStatistics(3, 16))
    stats = load(empty.to_stats_file())
    assert stats["count"].tolist() == [0]
    assert not any(stats[name].any() for name in ("mean", "std", "mean_token_norm"))
    assert stats["mean"].shape == (3, 16)


def test_bfloat16_is_read_as_its_values() -> None:
    values = torch.from_numpy(rows(50)).to(torch.bfloat16)
    sums = RunningStatistics(3, 16)
    sums.add(values)
    assert_equals_numpy(sums, values.float().numpy())
