"""safetensors files as memory maps, bfloat16 included: nothing is read from the disk before it is looked at."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from acsinfra.client.errors import CORRUPTED_DOWNLOAD, AcsError, invalid_argument
from acsinfra.client.tensors import BFLOAT16, as_array

type Array = npt.NDArray[Any]

# safetensors' names of the dtypes that NumPy has; bfloat16 comes from ml_dtypes.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": BFLOAT16,
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_HEADER_BYTES_AT_MOST: Final = 100_000_000


def open_tensors(path: Path) -> Mapping[str, Array]:
    """The tensors of a safetensors file as read-only arrays over one memory map, which lives as long as any of them.

    Raises AcsError (`corrupted_download`) where the file is not a whole safetensors file.
    """
    try:
        return _open_tensors(path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AcsError(f"{path} is not a whole safetensors file: {error}", code=CORRUPTED_DOWNLOAD) from error


def _open_tensors(path: Path) -> dict[str, Array]:
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int.from_bytes(whole[:8].tobytes(), "little")
    if len(whole) < 8 or not 2 <= header_bytes <= min(_HEADER_BYTES_AT_MOST, len(whole) - 8):
        raise ValueError("its header does not fit it")
    header = json.loads(whole[8 : 8 + header_bytes].tobytes())
    values = whole[8 + header_bytes :]
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not 0 <= start <= stop <= len(values) or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} does not fit its place")
        # np.ndarray and not a memmap: a plain array over the map, without memmap's cost at each slice.
        tensors[name] = np.asarray(values[start:stop]).view(dtype).reshape(shape)
    return tensors


def read_directions(path: Path, *, name: str | None = None) -> Array:
    """Directions [directions, hidden] from a `.npy` or `.safetensors` file, for `project_onto`.

    Of a safetensors file with several tensors, `name` says which. One vector [hidden] is one direction.
    """
    if path.suffix == ".npy":
        array = as_array(np.load(path, allow_pickle=False))
    elif path.suffix == ".safetensors":
        tensors = open_tensors(path)
        if name is None and len(tensors) != 1:
            raise invalid_argument(f"{path} holds {', '.join(sorted(tensors))}: name one as {path}:NAME.")
        chosen = name or next(iter(tensors))
        if chosen not in tensors:
            raise invalid_argument(f"{path} holds no tensor {chosen!r}, but {', '.join(sorted(tensors))}.")
        array = as_array(tensors[chosen])
    else:
        raise invalid_argument(f"{path} is neither .npy nor .safetensors.")
    return array[None] if array.ndim == 1 else array
