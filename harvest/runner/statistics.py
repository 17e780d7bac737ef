"""Mean, standard deviation and mean norm over a run's tokens, in one pass.

Rows are summed up in blocks of float32, and the blocks are merged in float64 by Chan, Golub and LeVeque's formula
("Updating formulae and a pairwise algorithm for computing sample variances", 1979), which does not lose digits where
the mean is large beside the deviation, as naive sums of squares do.
"""

import functools
from typing import Final, Self

import torch
from safetensors.torch import load, save

BLOCK_ROWS: Final = 128
# Fresh memory for every block would cost more than all the sums: the system has to clear it.
SCRATCH_BYTES: Final = 4 * 1024 * 1024


@functools.lru_cache(maxsize=2)
def _scratch(n_columns: int) -> torch.Tensor:
    """Memory for a block of some layers: float32 [layers, BLOCK_ROWS, columns]. One thread at a time."""
    return torch.empty(max(1, SCRATCH_BYTES // (4 * BLOCK_ROWS * n_columns)), BLOCK_ROWS, n_columns)


class RunningStatistics:
    """Sums over tokens of values [layers, tokens, columns]; two of them merge into one, in any order of their making.

    `mean` and `m2` (the sum of squared deviations) are float64 [layers, columns]; `norm_sum` float64 [layers].
    """

    def __init__(self, n_layers: int, n_columns: int) -> None:
        self.count = 0
        self.mean = torch.zeros(n_layers, n_columns, dtype=torch.float64)
        self.m2 = torch.zeros(n_layers, n_columns, dtype=torch.float64)
        self.norm_sum = torch.zeros(n_layers, dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        """Take in the tokens of `values` [layers, tokens, columns], of any floating dtype."""
        for start in range(0, values.shape[1], BLOCK_ROWS):
            block = values[:, start : start + BLOCK_ROWS]
            # Any pivot near the mean does: what it lacks stands in the deviations' sum.
            pivot = self.mean.float() if self.count else block.float().mean(dim=1)
            lacking, squares = torch.empty_like(pivot), torch.empty_like(pivot)
            norms = torch.empty(block.shape[:2])
            scratch = _scratch(block.shape[2])
            for first in range(0, len(block), len(scratch)):
                layers = slice(first, min(first + len(scratch), len(block)))
                rows = scratch[: layers.stop - layers.start, : block.shape[1]]
                rows.copy_(block[layers])
                torch.linalg.vector_norm(rows, dim=2, out=norms[layers])
                rows.sub_(pivot[layers, None])
                torch.sum(rows, dim=1, out=lacking[layers])
                torch.sum(rows.square_(), dim=1, out=squares[layers])
            count = block.shape[1]
            self.norm_sum += norms.sum(dim=1, dtype=torch.float64)
            far = lacking.double()
            self._merge(count, pivot.double() + far / count, squares.double() - far.square() / count)

    @property
    def is_finite(self) -> bool:
        """Whether every value so far was finite (or none was so large that its square is not)."""
        return bool(torch.isfinite(self.norm_sum).all())

    def merge(self, other: Self) -> None:
        """Take in all that `other` has."""
        self.norm_sum += other.norm_sum
        if other.count:
            self._merge(other.count, other.mean, other.m2)

    def to_bytes(self) -> bytes:
        """The exact state, as a safetensors file."""
        state = {"mean": self.mean, "m2": self.m2, "norm_sum": self.norm_sum, "count": torch.tensor([self.count])}
        return save(state)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` wrote."""
        state = load(content)
        restored = cls(*state["mean"].shape)
        restored.count = int(state["count"].item())
        restored.mean, restored.m2, restored.norm_sum = state["mean"], state["m2"], state["norm_sum"]
        return restored

    def to_stats_file(self) -> bytes:
        """The bytes of `stats.safetensors`; zeros when there was no token.

        `mean` and `std` (of the population) are float32 [layers, columns], `mean_token_norm` float32 [layers], `count`
        int64 [1].
        """
        tokens = max(1, self.count)
        return save(
            {
                "mean": self.mean.float(),
                "std": (self.m2 / tokens).sqrt().float(),
                "mean_token_norm": (self.norm_sum / tokens).float(),
                "count": torch.tensor([self.count], dtype=torch.int64),
            }
        )

    def _merge(self, count: int, mean: torch.Tensor, m2: torch.Tensor) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.m2 += m2 + delta.square_() * (self.count * count / total)
        self.count = total
