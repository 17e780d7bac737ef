"""What one request asks of the worker extension, and the checks that both ends make.

The options ride in `SamplingParams.extra_args` as one MessagePack value, so that vLLM copies a reference and never
walks through a tensor.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inference.engine.activations import ARRAY_DTYPES, to_float32
from inference.wire import SteeringVector

EXTRA_ARGS_KEY = "acsinfra"
MAX_SCALE = 1e6


class StreamOptions(msgspec.Struct, frozen=True, array_like=True):
    """One request's options.

    `path` and `host` name its row file, both empty when it has none (nothing captured, nothing steered). `max_rows`
    bounds the positions that can go through the model. `temperature` and `logprob_token_ids` are what vLLM's own
    parameters cannot say. `projection` names directions that the worker keeps: rows are then float32 components along
    them.
    """

    path: str = ""
    host: str = ""
    max_rows: int = 0
    capture_layers: tuple[int, ...] = ()
    steering: tuple[SteeringVector, ...] = ()
    temperature: float | None = None
    top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    projection: str = ""


_DECODER = msgspec.msgpack.Decoder(StreamOptions)


def encode_options(options: StreamOptions) -> dict[str, Any]:
    """Return `extra_args` that hold the options."""
    return {EXTRA_ARGS_KEY: msgspec.msgpack.encode(options)}


def decode_options(extra_args: Mapping[str, Any] | None) -> StreamOptions | None:
    """Read the options out of `extra_args`; None when there are none. Raises `msgspec.ValidationError`."""
    encoded = (extra_args or {}).get(EXTRA_ARGS_KEY)
    return None if encoded is None else _DECODER.decode(encoded)


def read_host_id() -> str:
    """Return what is the same for every process that shares this machine's memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_capture_layers(layers: tuple[int, ...], *, n_layers: int) -> None:
    """Raise `ValueError` unless the layers ascend without repeats inside the model."""
    if any(not 0 <= layer < n_layers for layer in layers):
        raise ValueError(f"a layer to capture is outside the model's {n_layers} layers")
    if any(later <= earlier for earlier, later in itertools.pairwise(layers)):
        raise ValueError("the layers to capture must ascend, each once")


def check_steering_vector(vector: SteeringVector, *, n_layers: int, hidden_size: int, max_rows: int) -> None:
    """Raise `ValueError` with a sentence unless the vector fits the model and itself.

    `max_rows` is the number of positions that can go through the model: prompt + max_tokens - 1.
    """
    layers = vector.layer_indices
    if not layers or len(set(layers)) != len(layers) or any(not 0 <= layer < n_layers for layer in layers):
        raise ValueError(f"a steering vector's layers must be distinct and inside the model's {n_layers} layers")
    positions, spans = vector.position_indices, vector.position_spans
    expected = (len(layers), hidden_size) if positions is None else (len(layers), len(positions), hidden_size)
    if vector.shape != expected:
        raise ValueError(f"a steering vector's shape is {list(vector.shape)} where {list(expected)} is needed")
    if len(vector.data) != math.prod(expected) * ARRAY_DTYPES[vector.dtype].itemsize:
        raise ValueError(f"a steering vector has {len(vector.data)} bytes, which its shape and dtype do not explain")
    if not math.isfinite(vector.scale) or abs(vector.scale) > MAX_SCALE:
        raise ValueError(f"a steering vector's scale must be finite and at most {MAX_SCALE:g} in size")
    if positions is not None:
        _check_positions(positions, max_rows=max_rows, has_spans=spans is not None)
    if spans is not None:
        _check_spans(spans)
    values = steering_values(vector)
    if not np.isfinite(values).all():
        raise ValueError("a steering vector holds a value that is not finite")
    if vector.norm_match and not values.any(axis=-1).all():
        raise ValueError("a steering vector with norm_match is zero somewhere and has no direction there")


def _check_positions(positions: tuple[int, ...], *, max_rows: int, has_spans: bool) -> None:
    if has_spans:
        raise ValueError("a steering vector has position_indices and position_spans")
    if not positions or len(set(positions)) != len(positions):
        raise ValueError("a steering vector's positions must be distinct and at least one")
    if any(not 0 <= position < max_rows for position in positions):
        raise ValueError(f"a steering vector's position is outside the {max_rows} that can go through the model")


def _check_spans(spans: tuple[tuple[int, int], ...]) -> None:
    if not spans or any(not 0 <= start < end for start, end in spans):
        raise ValueError("a steering vector's span must start at 0 or later and end after its start")
    ordered = sorted(spans)
    if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(ordered)):
        raise ValueError("a steering vector's spans overlap")


def steering_values(vector: SteeringVector) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Return the vector's values as float32 in its own shape."""
    raw = np.frombuffer(vector.data, ARRAY_DTYPES[vector.dtype]).reshape(vector.shape)
    return to_float32(raw, vector.dtype)
