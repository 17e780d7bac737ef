"""Captured rows where the worker lives in the front's own process: written once, where the front wants them.

The counterpart of `row_files` for an engine in one process. A block's output is added straight into the front's array
[layers, rows, columns], which may be a part of a shard: no file, no copy for each request.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from inference.engine.row_files import RowWriter

_SCHEME = "memory:"
_numbers = itertools.count()
_writers: dict[str, "LocalRowWriter"] = {}


class LocalRowWriter:
    """The worker's end: `tensor` [layers, rows, columns] is the front's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Write into `tensor`."""
        self.tensor = tensor
        self.fault: str | None = None
        self.rows_done = 0
        self.ranks: set[int] = set()

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of all layers."""
        layers, _, columns = self.tensor.shape
        return int(layers * columns * self.tensor.itemsize)

    def take_up(self, rank: int) -> None:
        """Say that this rank acts on the request."""
        self.ranks.add(rank)

    def write_rows(self, position: int, columns: Sequence[int], rows: torch.Tensor) -> None:
        """Put `rows` [count, len(columns), values] of the layers at `columns` at the positions from `position` on."""
        into = self.tensor[:, position : position + len(rows)]
        for index, column in enumerate(columns):
            into[column].copy_(rows[:, index])

    def set_rows_done(self, rows: int) -> None:
        """Say that the rows of positions 0 to `rows` - 1 are there."""
        self.rows_done = rows

    def mark_fault(self, message: str) -> None:
        """Mark the request as failed; the first mark stays."""
        self.fault = self.fault or message

    def close(self) -> None:
        """Nothing to free: the front's end has the memory."""


class LocalRows:
    """The front's end of one request's rows, an array [layers, rows, columns]. Always `close` it."""

    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        """Have the worker write into `array`, int16 bits for bfloat16."""
        self._array = array
        tensor = torch.from_numpy(array)
        self._writer = LocalRowWriter(tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor)
        self.path = f"{_SCHEME}{next(_numbers)}"
        _writers[self.path] = self._writer

    def is_taken_up_by(self, ranks: frozenset[int]) -> bool:
        """Say whether every one of these worker ranks has read and accepted the request's options."""
        return ranks <= self._writer.ranks

    @property
    def fault(self) -> str | None:
        """What went wrong with this request in the worker, or None."""
        return self._writer.fault

    @property
    def rows_done(self) -> int:
        """How many rows, from position 0 on and without a gap, the worker has written."""
        return self._writer.rows_done

    def read(self, *, rows: int, layers: int, columns: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """The first `rows` rows as [layers, rows, columns], not copied. Ask `rows_done` first."""
        assert self._array.shape[::2] == (layers, columns)
        assert self._array.dtype == dtype
        return self._array[:, :rows]

    def close(self) -> None:
        """Let the worker find these rows no more."""
        _writers.pop(self.path, None)


def open_rows(path: str) -> RowWriter | LocalRowWriter:
    """Return the worker's end of a request's rows; raises `OSError` or `ValueError` when there is nothing."""
    if not path.startswith(_SCHEME):
        return RowWriter(path)
    try:
        return _writers[path]
    except KeyError:
        raise ValueError("these rows are closed") from None
