"""Making requests for the engine's tests, and reading their answers."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inference.wire import EngineRequest, Sampling, SteeringVector
from tests.inference.engine.reference import Float32Array, Reference, ReferenceSteering

if TYPE_CHECKING:
    from inference.engine.activations import CapturedActivations
    from inference.wire import EngineDelta

    Answer = tuple[list[EngineDelta], CapturedActivations | None]

ALL_LAYERS = (0, 1, 2, 3)
HIDDEN = 64
VOCABULARY = 640

_numbers = itertools.count()


def make_prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return a BOS and random token ids, the same for the same seed."""
    ids = np.random.default_rng(seed).integers(2, VOCABULARY, length - 1)
    return (0, *(int(token_id) for token_id in ids))


def make_request(
    prompt: Sequence[int],
    *,
    capture: tuple[int, ...] = (),
    steering: Sequence[SteeringVector] = (),
    **sampling: Any,
) -> EngineRequest:
    """Return a request, greedy and past the end token unless `sampling` says otherwise."""
    return EngineRequest(
        request_id=f"test-{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}),
        capture_layers=capture,
        steering=tuple(steering),
    )


def make_vector(
    values: Float32Array,
    layers: tuple[int, ...],
    **fields: Any,
) -> SteeringVector:
    """Return a float32 steering vector of `values`, [layers, hidden] or [layers, positions, hidden]."""
    return SteeringVector(
        data=values.astype(np.float32).tobytes(),
        dtype="float32",
        shape=values.shape,
        layer_indices=layers,
        **fields,
    )


def make_values(*shape: int, seed: int = 0) -> Float32Array:
    """Return random values about as large as the tiny model's residual stream."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spell_out(vector: SteeringVector, n_positions: int) -> ReferenceSteering:
    """Return what a steering vector means, position by position, as api.md words it."""
    values = np.frombuffer(vector.data, np.float32).reshape(vector.shape)
    rows: dict[int, dict[int, Float32Array]] = {}
    for slot, layer in enumerate(vector.layer_indices):
        if vector.position_indices is not None:
            rows[layer] = {position: values[slot, index] for index, position in enumerate(vector.position_indices)}
        else:
            spans = vector.position_spans or ((0, n_positions),)
            rows[layer] = {position: values[slot] for start, end in spans for position in range(start, end)}
    return ReferenceSteering(rows, scale=vector.scale, norm_match=vector.norm_match)


def generated_ids(answer: "Answer | BaseException") -> tuple[int, ...]:
    """Return the token ids of an answer with n = 1; raises what the request raised."""
    if isinstance(answer, BaseException):
        raise answer
    return tuple(token_id for delta in answer[0] for token_id in delta.token_ids)


def generated_text(answer: "Answer | BaseException") -> str:
    """Return the text of an answer with n = 1; raises what the request raised."""
    if isinstance(answer, BaseException):
        raise answer
    return "".join(delta.text for delta in answer[0])


def captured_stream(answer: "Answer | BaseException") -> Float32Array:
    """Return the float32 rows that a request captured, [layers, tokens, hidden]; raises what it raised."""
    if isinstance(answer, BaseException):
        raise answer
    captured = answer[1]
    assert captured is not None
    assert captured.dtype == "float32"
    assert captured.array.dtype == np.float32
    return captured.array.astype(np.float32)


def sequence_read(request: EngineRequest, answer: "Answer | BaseException") -> tuple[int, ...]:
    """Return the ids that went through the model: the prompt and all generated ones but the last."""
    return (*request.prompt_token_ids, *generated_ids(answer)[:-1])


def assert_same_stream(stream: Float32Array, reference: Reference, *, layers: Sequence[int] = ALL_LAYERS) -> None:
    """Assert shape, and 1e-5 relative to the norm of each row at each layer and position."""
    expected = reference.stream[list(layers)]
    assert stream.shape == expected.shape
    error = np.linalg.norm(stream - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= 1e-5, f"relative error {error.max():.3g} at {np.unravel_index(error.argmax(), error.shape)}"


def assert_projected(values: np.ndarray[Any, Any], stream: np.ndarray[Any, Any], directions: Float32Array) -> None:
    """Assert float32 components of `stream` along the directions at length 1, 1e-5 relative to float64's.

    A component that is next to nothing beside its row has the row's rounding in it.
    """
    exact = directions.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    expected = stream.astype(np.float64) @ exact.T
    assert values.dtype == np.float32
    assert values.shape == expected.shape
    rounding = 1e-7 * np.linalg.norm(stream.astype(np.float64), axis=-1, keepdims=True)
    assert (np.abs(values - expected) <= 1e-5 * np.abs(expected) + rounding).all()
