"""Steering vectors inside a worker: decoded once, applied to the rows of a step."""

import hashlib
from collections import OrderedDict

import numpy as np
import torch

from inference.engine.stream_options import check_steering_vector, steering_values
from inference.wire import SteeringVector

MAX_CACHED_BYTES = 256 * 1024 * 1024


class SteeringTensors:
    """The decoded tensors of steering vectors, by what they hold: a bounded cache, the oldest use leaves first."""

    def __init__(self, device: torch.device, *, max_bytes: int = MAX_CACHED_BYTES) -> None:
        """Keep at most `max_bytes` of float32 tensors on `device`."""
        self._device = device
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tensors: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def decode(self, vector: SteeringVector) -> torch.Tensor:
        """Return the vector's values, float32 in its own shape, on the device; of length 1 each with norm_match."""
        key = hashlib.sha256(vector.data).digest() + f"{vector.dtype}{vector.shape}{vector.norm_match}".encode()
        tensor = self._tensors.get(key)
        if tensor is None:
            values = steering_values(vector)
            if vector.norm_match:
                # In float64, where no finite float32 vector's squares overflow or vanish.
                exact = values.astype(np.float64)
                values = (exact / np.linalg.norm(exact, axis=-1, keepdims=True)).astype(np.float32)
            tensor = torch.from_numpy(values.copy()).to(self._device)
            self._tensors[key] = tensor
            self._bytes += tensor.nbytes
        self._tensors.move_to_end(key)
        while self._bytes > self._max_bytes and len(self._tensors) > 1:
            _, dropped = self._tensors.popitem(last=False)
            self._bytes -= dropped.nbytes
        return tensor

    @property
    def nbytes(self) -> int:
        """How much is kept at present."""
        return self._bytes


class PlacedVector:
    """One steering vector of a request, ready to be added at absolute positions."""

    def __init__(
        self,
        vector: SteeringVector,
        tensors: SteeringTensors,
        *,
        n_layers: int,
        hidden_size: int,
        max_rows: int,
    ) -> None:
        """Check the vector again (the front did) and decode it. Raises `ValueError`."""
        check_steering_vector(vector, n_layers=n_layers, hidden_size=hidden_size, max_rows=max_rows)
        self._values = tensors.decode(vector)
        self._slot_of_layer = {layer: slot for slot, layer in enumerate(vector.layer_indices)}
        self._scale = vector.scale
        self._norm_match = vector.norm_match
        self._spans = vector.position_spans
        self._positions: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
        if vector.position_indices is not None:
            positions = np.asarray(vector.position_indices, np.int64)
            self._order = np.argsort(positions)
            self._positions = positions[self._order]

    @property
    def layers(self) -> frozenset[int]:
        """The layers after which this vector is added."""
        return frozenset(self._slot_of_layer)

    def find_rows(self, start: int, end: int) -> tuple[slice | torch.Tensor, torch.Tensor | None] | None:
        """Say which of the positions `start` to `end` - 1 the vector touches; None for none.

        Returns their indices from `start` on, and for a vector with position indices the index of each one's values.
        """
        if self._positions is not None:
            low, high = np.searchsorted(self._positions, (start, end))
            if low == high:
                return None
            return torch.from_numpy(self._positions[low:high] - start), torch.from_numpy(self._order[low:high])
        if self._spans is None:
            return slice(0, end - start), None
        inside = [range(max(a, start) - start, min(b, end) - start) for a, b in self._spans]
        rows = [row for span in inside for row in span]
        return (torch.tensor(rows), None) if rows else None

    def amount(self, layer: int, picks: torch.Tensor | None, unsteered: torch.Tensor) -> torch.Tensor:
        """Return what to add after `layer` to rows whose unsteered residual stream is given, float32 [rows, hidden].

        `picks` chooses the values of each row (see `find_rows`), None one vector for all. With norm_match each row's
        vector gets the norm of the row's unsteered residual stream before the scale.
        """
        values: torch.Tensor = self._values[self._slot_of_layer[layer]]
        if picks is not None:
            values = values[picks.to(values.device)]
        if not self._norm_match:
            return values * self._scale
        return values * (torch.linalg.vector_norm(unsteered, dim=-1, keepdim=True) * self._scale)


def steer_rows(
    vectors: list[PlacedVector], *, layer: int, start: int, unsteered: torch.Tensor
) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
    """Add each vector, in order, to one request's rows of this step after block `layer`.

    `unsteered` is float32 [rows, hidden], the rows at absolute positions from `start` on. Returns the rows that were
    touched and their steered values, or None when no vector touches any.
    """
    steered: torch.Tensor | None = None
    touched = torch.zeros(unsteered.shape[0], dtype=torch.bool, device=unsteered.device)
    for vector in vectors:
        if layer not in vector.layers:
            continue
        found = vector.find_rows(start, start + unsteered.shape[0])
        if found is None:
            continue
        rows, picks = found
        if isinstance(rows, torch.Tensor):
            rows = rows.to(unsteered.device)
        if steered is None:
            steered = unsteered.clone()
        steered[rows] += vector.amount(layer, picks, unsteered[rows])
        touched[rows] = True
    if steered is None:
        return None
    if bool(touched.all()):
        return slice(None), steered
    rows_touched = touched.nonzero().flatten()
    return rows_touched, steered[rows_touched]
