"""Tensors as a researcher's client writes them into JSON."""

import base64
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
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


def wrong_tensors() -> Iterator[tuple[dict[str, Any], str, tuple[str, ...]]]:
    """Tensors [vectors, 64] that no route takes, each with the key that is wrong and the byte counts to be named.

    What came is first of the counts, where it can be told; then what the shape takes.
    """
    array = np.ones((1, 64), "<f4")
    good = tensor_json(array, compression="none")
    for changes, key, counts in (
        ({"dtype": "float64"}, "dtype", ("256",)),
        ({"dtype": "int16"}, "original_dtype", ("256", "128")),
        ({"original_dtype": "torch.float16"}, "original_dtype", ("256", "256")),
        ({"compression": "gzip"}, "compression", ("256", "256")),
        ({"shape": [1, 0]}, "shape.1", ("256",)),
        ({"shape": [1, 1, 1, 64]}, "shape", ("256",)),
        ({"shape": [1, 63]}, "shape", ("256", "252")),
        ({"shape": [2, 64]}, "data", ("256", "512")),
        ({"dtype": "float16", "original_dtype": None}, "data", ("256", "128")),
        ({"data": good["data"][:-1]}, "data", ("343 characters", "256")),
        ({"data": "?" * 344}, "data", ("344 characters", "256")),
        ({"compression": "zstd"}, "data", ("256", "256")),
    ):
        yield {**good, **changes}, key, counts
    for frame in (zstandard.compress(array.tobytes())[:-1], zstandard.compress(bytes(64 * 2**20))):
        bomb = base64.b64encode(frame).decode()
        yield {**good, "compression": "zstd", "data": bomb}, "data", (f"{len(frame):,}", "256")
    array[0, 5] = np.nan
    yield tensor_json(array), "data", ("256",)
    yield tensor_json(np.zeros((1, 64), "<f4"), compression="none"), "data", ("256",)


def assert_named(answer: httpx.Response, *, param: str, counts: tuple[str, ...]) -> None:
    """Check that an answer refuses `param`, and that its message names the counts, each of its own."""
    assert answer.status_code == 400, answer.text
    refused = answer.json()["error"]
    assert (refused["code"], refused["param"]) == ("invalid_request", param), refused
    numbers = Counter(re.findall(r"\d[\d,]*\d|\d", refused["message"]))
    assert not Counter(count.removesuffix(" characters") for count in counts) - numbers, refused
