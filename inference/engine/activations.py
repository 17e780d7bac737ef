"""The residual stream of one request, as an engine hands it over."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inference.wire import TensorDtype

# How each of the model's dtypes lies in a NumPy array: bfloat16, which NumPy lacks, as its bits.
ARRAY_DTYPES: dict[TensorDtype, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_BFLOAT16_EXPONENT = 0x7F80


@dataclass(frozen=True)
class CapturedActivations:
    """The residual stream after each of `layers`, at every position that went through the model.

    `array` is [layers, tokens, hidden], C order, little-endian; int16 bits where `dtype` is bfloat16.
    """

    layers: tuple[int, ...]
    dtype: TensorDtype
    array: npt.NDArray[np.generic]


def to_float32(array: npt.NDArray[np.generic], dtype: TensorDtype) -> npt.NDArray[np.float32]:
    """Return the values of an array of `dtype` (int16 bits for bfloat16) as float32; a copy unless float32."""
    if dtype == "bfloat16":
        bits = array.view(np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def all_finite(array: npt.NDArray[np.generic], dtype: TensorDtype) -> bool:
    """Say whether no value of an array of `dtype` (int16 bits for bfloat16) is infinite or NaN."""
    if dtype == "bfloat16":
        return not bool(((array.view(np.uint16) & np.uint16(_BFLOAT16_EXPONENT)) == _BFLOAT16_EXPONENT).any())
    return bool(np.isfinite(array).all())
