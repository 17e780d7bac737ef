"""The `activations` object of an answer."""

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from inference.answers import MisbehavedEngine
from inference.engine.activations import CapturedActivations

# Residual streams hardly compress; the lowest level costs least and loses little.
ZSTD_LEVEL = 1


def check_capture(
    captured: Sequence[CapturedActivations], *, layers: tuple[int, ...], tokens: int, hidden: int
) -> CapturedActivations:
    """The one capture of a request, if it has the layers and the shape [layers, tokens, hidden] that were asked for."""
    if len(captured) != 1:
        raise MisbehavedEngine(f"The engine gave {len(captured)} captures for one prompt.")
    capture = captured[0]
    if capture.layers != layers or capture.array.shape != (len(layers), tokens, hidden):
        raise MisbehavedEngine(
            f"The engine captured layers {list(capture.layers)} in shape {list(capture.array.shape)}, "
            f"not layers {list(layers)} in shape {[len(layers), tokens, hidden]}."
        )
    return capture


def activations_json(capture: CapturedActivations) -> bytes:
    """`capture` as the API's `activations`: zstd of its bytes in C order, in base64. Long: for a thread.

    bfloat16 goes as its bits, viewed as int16. The engine has seen that every value is finite.
    """
    array = np.ascontiguousarray(capture.array)
    data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(array.data)
    described = {
        "dtype": "int16" if capture.dtype == "bfloat16" else capture.dtype,
        "original_dtype": f"torch.{capture.dtype}",
        "shape": array.shape,
        "compression": "zstd",
    }
    head = msgspec.json.encode(described)
    return b"".join((b'{"residual_stream":{"data":"', base64.b64encode(data), b'",', head[1:], b"}"))
