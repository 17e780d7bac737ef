"""Tensors as they travel in JSON, to and from NumPy; bfloat16 is `ml_dtypes.bfloat16`, and torch is never needed."""

import base64
import binascii
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import zstandard

from acsinfra.client.errors import INVALID_ANSWER, AcsError, invalid_argument

type Array = npt.NDArray[Any]
type WireTensor = dict[str, Any]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_BY_ORIGINAL_DTYPE: Final[dict[str, np.dtype[Any]]] = {
    "torch.bfloat16": BFLOAT16,
    "torch.float16": np.dtype("<f2"),
    "torch.float32": np.dtype("<f4"),
}
_ZSTD_WINDOW_BYTES: Final = 128 * 1024 * 1024


def as_array(tensor: object) -> Array:
    """A torch tensor, NumPy array or nested list as a NumPy array; torch's bfloat16 becomes `ml_dtypes.bfloat16`.

    torch is imported only for a tensor of torch. float64 becomes float32, the widest that the API takes.
    """
    if type(tensor).__module__.partition(".")[0] == "torch":
        from acsinfra.client.torch_data import to_numpy

        array = to_numpy(tensor)
    else:
        array = np.asarray(tensor)
    if array.dtype == BFLOAT16 or array.dtype in (np.dtype("f2"), np.dtype("f4")):
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "fiu":
        raise invalid_argument(f"A tensor holds numbers, not {array.dtype}.")
    return np.ascontiguousarray(array, dtype="<f4")


def encode_tensor(tensor: object, *, compress: bool = True) -> WireTensor:
    """A tensor as the API takes it: the base64 of its little-endian bytes in C order, zstd-compressed if asked.

    Raises AcsError (`invalid_argument`) for an empty tensor or one with a value that is not finite.
    """
    array = as_array(tensor)
    if array.size == 0:
        raise invalid_argument(f"The tensor is empty: its shape is {array.shape}.")
    if not np.isfinite(array).all():
        raise invalid_argument("The tensor holds a value that is not finite.")
    is_bfloat16 = array.dtype == BFLOAT16
    bits = array.view(np.int16) if is_bfloat16 else array
    raw = bits.astype(bits.dtype.newbyteorder("<")).tobytes()
    return {
        "data": base64.b64encode(zstandard.compress(raw) if compress else raw).decode("ascii"),
        "dtype": "int16" if is_bfloat16 else array.dtype.name,
        "original_dtype": f"torch.{'bfloat16' if is_bfloat16 else array.dtype.name}",
        "shape": list(array.shape),
        "compression": "zstd" if compress else "none",
    }


def decode_tensor(wire: WireTensor) -> Array:
    """A tensor of an answer as an array of its original dtype: `ml_dtypes.bfloat16`, float16 or float32.

    `.astype(np.float32)` on it is exact. Raises AcsError (`invalid_answer`) where the bytes are not the shape's.
    """
    try:
        shape = tuple(int(length) for length in wire["shape"])
        dtype = _BY_ORIGINAL_DTYPE[wire["original_dtype"]]
        data = binascii.a2b_base64(wire["data"], strict_mode=True)
        size = math.prod(shape) * dtype.itemsize
        if wire.get("compression") == "zstd":
            data = _decompress(data, size)
    except (KeyError, TypeError, ValueError, zstandard.ZstdError) as error:
        raise AcsError(f"The tensor in the answer cannot be read: {error}", code=INVALID_ANSWER) from error
    if len(data) != size:
        message = f"The tensor in the answer has {len(data):,} bytes; its shape {shape} takes {size:,}."
        raise AcsError(message, code=INVALID_ANSWER)
    return np.frombuffer(data, dtype).reshape(shape)


def _decompress(data: bytes, size: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).stream_reader(data) as reader:
        return reader.read(size + 1)


def steering_vector(
    activations: object,
    layer_indices: int | Sequence[int],
    *,
    scale: float = 1.0,
    norm_match: bool = False,
    position_indices: Sequence[int] | None = None,
    position_spans: Iterable[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """A Steering vector for `steering_vectors=` of `Client.complete`.

    `activations`: [hidden] for one layer, [layers, hidden], or [layers, positions, hidden] with `position_indices`
    (absolute, from 0). `position_spans`: half-open `(start, end)` pairs where a [layers, hidden] vector is added.
    `norm_match` scales the vector to the norm of the unsteered residual stream at each position before `scale`.
    """
    layers = [layer_indices] if isinstance(layer_indices, int) else list(layer_indices)
    array = as_array(activations)
    if array.ndim == 1:
        array = array[None]
    if array.ndim not in (2, 3) or array.shape[0] != len(layers):
        raise invalid_argument(
            f"activations must be [{len(layers)} layers, hidden] or [{len(layers)} layers, positions, hidden], "
            f"not {list(array.shape)}."
        )
    vector: dict[str, Any] = {
        "activations": encode_tensor(array),
        "layer_indices": layers,
        "scale": float(scale),
        "norm_match": norm_match,
    }
    if position_indices is not None:
        vector["position_indices"] = list(position_indices)
    if position_spans is not None:
        vector["position_spans"] = [list(span) for span in position_spans]
    return vector
