"""Steering vectors: from the request's fields to what the engine adds to the residual stream."""

from itertools import pairwise
from typing import Any, Final

from acsinfra.core.errors import ApiError
from acsinfra.core.fields import (
    FieldFault,
    StrictBooleanField,
    StrictFloatField,
    StrictIntegerField,
    StrictListField,
    StrictSerializer,
    within,
)
from inference.selectors import CatalogueModel
from inference.tensors import Tensor, TensorSerializer, decode_tensor, tensor_bytes, with_byte_counts
from inference.wire import SteeringVector

MAX_SCALE: Final = 1e6
# All vectors of a request together, decoded. A body of 10 MiB holds less, unless it expands.
MAX_STEERING_BYTES: Final = 32 * 1024 * 1024
# From this much base64 on, decoding and checking are worth a thread.
DECODE_IN_THREAD_CHARACTERS: Final = 64 * 1024


class SteeringVectorSerializer(StrictSerializer):
    """A tensor added to the residual stream after some layers: at every position, at listed ones, or in spans."""

    activations = TensorSerializer(
        help_text="Shape (layers, hidden), or (layers, positions, hidden) with position_indices."
    )
    layer_indices = StrictListField(
        child=StrictIntegerField(min_value=0),
        min_length=1,
        max_length=256,
        distinct=True,
        help_text="The layers of the tensor's first axis.",
    )
    scale = StrictFloatField(
        min_value=-MAX_SCALE, max_value=MAX_SCALE, default=1.0, help_text="What the tensor is multiplied by."
    )
    norm_match = StrictBooleanField(
        default=False, help_text="Scale each vector to the norm of the unsteered stream there, before `scale`."
    )
    position_indices = StrictListField(
        child=StrictIntegerField(min_value=0),
        min_length=1,
        distinct=True,
        required=False,
        help_text="Absolute, from 0, one for each position of a tensor of 3 axes.",
    )
    position_spans = StrictListField(
        child=StrictListField(child=StrictIntegerField(min_value=0), min_length=2, max_length=2),
        min_length=1,
        required=False,
        help_text="Half-open [start, end) pairs that don't overlap.",
    )

    @classmethod
    def check_object(cls, checked: dict[str, Any]) -> dict[str, Any]:
        """Hold shape, layers and positions to each other; the model and the prompt come later."""
        tensor, layers = checked["activations"], checked["layer_indices"]
        shape = tensor["shape"]
        indices, spans = checked.get("position_indices"), checked.get("position_spans")
        if len(shape) == 1:
            raise _wrong_shape("must be (layers, hidden) or (layers, positions, hidden).", tensor)
        if shape[0] != len(layers):
            raise _wrong_shape(f"has {shape[0]:,} layers, and layer_indices has {len(layers)}.", tensor)
        if indices is not None and spans is not None:
            raise FieldFault("excludes position_indices.", param="position_spans")
        if len(shape) == 3 and indices is None:
            param = "position_spans" if spans is not None else "position_indices"
            message = "needs a tensor of 2 axes." if spans is not None else "is required with a tensor of 3 axes."
            raise FieldFault(message, param=param)
        if indices is not None:
            if len(shape) != 3:
                raise FieldFault("needs a tensor of 3 axes.", param="position_indices")
            if len(indices) != shape[1]:
                message = f"has {shape[1]:,} positions, and position_indices has {len(indices):,}."
                raise _wrong_shape(message, tensor)
        if spans is not None:
            _check_spans(spans)
        return checked


def check_against_model(vectors: list[dict[str, Any]], model: CatalogueModel) -> None:
    """Check layers, hidden size and the size in all, before anything is decoded; raises FieldFault."""
    total = 0
    for index, vector in enumerate(vectors):
        shape = vector["activations"]["shape"]
        for at, layer in enumerate(vector["layer_indices"]):
            if layer >= model.n_layers:
                message = f"must be under {model.n_layers}: {model.name} has layers 0 to {model.n_layers - 1}."
                raise FieldFault(message, param=f"{index}.layer_indices.{at}")
        if shape[-1] != model.hidden_size:
            message = f"ends in {shape[-1]:,}, and the hidden size of {model.name} is {model.hidden_size:,}."
            raise within(index, _wrong_shape(message, vector["activations"]))
        total += tensor_bytes(vector["activations"])
        if total > MAX_STEERING_BYTES:
            message = f"asks for more than {MAX_STEERING_BYTES:,} bytes in all vectors up to this: {total:,}."
            raise within(index, _wrong_shape(message, vector["activations"]))


def check_positions(vectors: list[dict[str, Any]], last_position: int) -> None:
    """Refuse positions past `last_position`, the last that goes through the model; raises FieldFault."""
    limit = f"must be at most {last_position:,}: the last position that goes through the model"
    for index, vector in enumerate(vectors):
        for at, position in enumerate(vector.get("position_indices") or ()):
            if position > last_position:
                raise FieldFault(f"{limit}.", param=f"{index}.position_indices.{at}")
        for at, (_start, end) in enumerate(vector.get("position_spans") or ()):
            if end - 1 > last_position:
                raise FieldFault(f"{limit}, plus one.", param=f"{index}.position_spans.{at}.1")


def is_long_to_decode(vectors: list[dict[str, Any]]) -> bool:
    """Whether decoding would hold up the event loop."""
    sizes = (max(len(vector["activations"]["data"]), tensor_bytes(vector["activations"])) for vector in vectors)
    return sum(sizes) > DECODE_IN_THREAD_CHARACTERS


def decode_vectors(vectors: list[dict[str, Any]]) -> tuple[SteeringVector, ...]:
    """The vectors for the engine, in the order of the request, without those of scale 0; raises FieldFault."""
    decoded: list[SteeringVector] = []
    for index, vector in enumerate(vectors):
        try:
            steering = _decode_vector(vector)
        except ApiError as error:
            raise within(index, error) from None
        if steering.scale != 0:
            decoded.append(steering)
    return tuple(decoded)


def _decode_vector(vector: dict[str, Any]) -> SteeringVector:
    try:
        tensor = decode_tensor(vector["activations"])
    except ApiError as error:
        raise within("activations", error) from None
    if vector["norm_match"]:
        _refuse_zero_vectors(tensor, vector["activations"])
    indices, spans = vector.get("position_indices"), vector.get("position_spans")
    return SteeringVector(
        data=tensor.data,
        dtype=tensor.dtype,
        shape=tensor.shape,
        layer_indices=tuple(vector["layer_indices"]),
        scale=vector["scale"],
        norm_match=vector["norm_match"],
        position_indices=None if indices is None else tuple(indices),
        position_spans=None if spans is None else tuple((start, end) for start, end in spans),
    )


def _refuse_zero_vectors(tensor: Tensor, fields: dict[str, Any]) -> None:
    if tensor.has_zero_vector():
        fault = FieldFault("holds a zero vector, which norm_match can't scale.", param="activations.data")
        raise with_byte_counts(fault, fields)


def _wrong_shape(message: str, tensor: dict[str, Any]) -> FieldFault:
    return with_byte_counts(FieldFault(message, param="activations.shape"), tensor)


def _check_spans(spans: list[list[int]]) -> None:
    for at, (start, end) in enumerate(spans):
        if start >= end:
            raise FieldFault("must start before it ends.", param=f"position_spans.{at}")
    ordered = sorted((start, end, at) for at, (start, end) in enumerate(spans))
    for (_, end, _), (start, _, at) in pairwise(ordered):
        if start < end:
            raise FieldFault("overlaps another span.", param=f"position_spans.{at}")
