"""The residual stream projected onto a few directions."""

from typing import Self

import numpy as np
import torch


class Projection:
    """Directions of length 1, float32 [directions, hidden]."""

    def __init__(self, directions: torch.Tensor) -> None:
        # In float64, because a direction's square may be past float32.
        exact = directions.double()
        self._directions = (exact / torch.linalg.vector_norm(exact, dim=1, keepdim=True)).float()

    @classmethod
    def from_bytes(cls, content: bytes, hidden_size: int) -> Self:
        """Directions from float32 little-endian bytes [directions, hidden], of any length but zero."""
        return cls(torch.from_numpy(np.frombuffer(content, "<f4").reshape(-1, hidden_size).copy()))

    @property
    def n_directions(self) -> int:
        """How many there are."""
        return len(self._directions)

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """The components of `values` [layers, tokens, hidden] along each direction: float32 [layers, tokens, n]."""
        return values.to(torch.float32) @ self._directions.T
