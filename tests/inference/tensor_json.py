"""Tensors as a researcher's client writes them into JSON."""

import base64
from typing import Any

import numpy as np
import zstandard


def tensor_json(array: np.ndarray[Any, Any], *, compression: str | None = "zstd") -> dict[str, Any]:
    """Return the tensor object of a float32, float16 or int16 (the bits of bfloat16) array."""
    raw = array.tobytes()
    data = zstandard.ZstdCompressor().compress(raw) if compression == "zstd" else raw
    original = {"int16": "torch.bfloat16"}.get(array.dtype.name, f"torch.{array.dtype.name}")
    return {
        "data": base64.b64encode(data).decode(),
        "dtype": array.dtype.name,
        "original_dtype": original,
        "shape": list(array.shape),
        "compression": compression,
    }


def bfloat16_bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return the bits of float32 values cut to bfloat16."""
    return (array.astype("<f4").view("<u4") >> 16).astype("<u2").view("<i2")
