"""From the fields of a request to a checked plan of what a job will read and write."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from django.conf import settings

from acsinfra.core.errors import ApiError, ErrorCode, invalid
from acsinfra.core.fields import FieldFault, within
from harvest.services import HarvestPlan
from inference.selectors import CatalogueModel
from inference.tensors import Tensor, decode_tensor, tensor_bytes, with_byte_counts

DIRECTIONS_AT_MOST: Final = 64
# What a prompt adds beside its values: two entries in its shard's header, one in the manifest.
BYTES_BESIDE_A_PROMPT: Final = 512
BYTES_BESIDE_A_RUN: Final = 64 * 1024
_ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


def plan_harvest(fields: Mapping[str, Any], model: CatalogueModel) -> HarvestPlan:
    """Check what depends on the model. `fields` are HarvestRequestSerializer's. Takes a while for a large corpus.

    Raises ApiError: `harvest_unsupported`, `invalid_request` for a layer or directions that the model has not,
    `corpus_too_large` past `settings.HARVEST_MAX_BYTES`.
    """
    if not model.has_harvest:
        raise ApiError(ErrorCode.HARVEST_UNSUPPORTED, f"{model.name} takes no Harvest jobs.", param="model")
    layers = choose_layers(fields, model.n_layers)
    directions = _directions(fields["project_onto"], model.hidden_size) if "project_onto" in fields else None
    prompt_bytes = [len(prompt.encode()) for prompt in fields["prompts"]]
    plan = HarvestPlan(
        base_model_id=model.id,
        model=model.name,
        prompts=fields["prompts"],
        layers=layers,
        shard_size=fields["shard_size"],
        batch_size=fields.get("batch_size"),
        add_special_tokens=fields["add_special_tokens"],
        directions=None if directions is None else directions.tobytes(),
        reserved_tokens=sum(prompt_bytes) + len(prompt_bytes),
        bytes_at_most=_bytes_at_most(prompt_bytes, len(layers), None if directions is None else len(directions), model),
    )
    if plan.bytes_at_most > settings.HARVEST_MAX_BYTES:
        raise ApiError(
            ErrorCode.CORPUS_TOO_LARGE,
            f"This job may write up to {plan.bytes_at_most:,} bytes; a job may write {settings.HARVEST_MAX_BYTES:,}. "
            "Send fewer prompts or fewer layers.",
            param="prompts",
        )
    return plan


def choose_layers(fields: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """The layers to read, ascending: those given, all, or the quartiles. Raises `400 invalid_request`."""
    if "layers" not in fields:
        return tuple(sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4}))
    given: list[int] | None = fields["layers"]
    if given is None:
        return tuple(range(n_layers))
    for at, layer in enumerate(given):
        if layer >= n_layers:
            raise invalid(
                f"layers.{at} is {layer}; the model has {n_layers} layers, 0 to {n_layers - 1}.", param=f"layers.{at}"
            )
    return tuple(sorted(set(given)))


def _directions(fields: dict[str, Any], hidden_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The directions as float32 [directions, hidden], as they came: the runner scales them."""
    try:
        shape = fields["shape"]
        if len(shape) != 2 or shape[1] != hidden_size or not 1 <= shape[0] <= DIRECTIONS_AT_MOST:
            fault = FieldFault(
                f"must be [1 to {DIRECTIONS_AT_MOST} directions, {hidden_size:,} hidden], not {shape}.", param="shape"
            )
            raise with_byte_counts(fault, fields)
        directions = _as_float32(decode_tensor(fields))
        zeros = np.flatnonzero(~directions.any(axis=1))
        if len(zeros):
            zero_bytes = tensor_bytes(fields) // len(directions)
            raise FieldFault(
                f"holds only zeros in the {zero_bytes:,} bytes of direction {zeros[0]}, which has no length to scale.",
                param="data",
            )
    except FieldFault as fault:
        named = within("project_onto", fault)
        raise invalid(f"{named.param} {named.message}", param=named.param) from None
    return directions


def _as_float32(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u2").astype("<u4") << np.uint32(16)
        return bits.view("<f4").reshape(tensor.shape)
    dtype = "<f2" if tensor.dtype == "float16" else "<f4"
    return np.frombuffer(tensor.data, dtype).astype("<f4").reshape(tensor.shape)


def _bytes_at_most(prompt_bytes: list[int], n_layers: int, n_directions: int | None, model: CatalogueModel) -> int:
    """A bound on the job's files: a token is a byte of text at least, and one more begins each prompt."""
    tokens = sum(min(length + 1, model.max_model_len - 1) for length in prompt_bytes)
    if n_directions is None:
        token_bytes = n_layers * model.hidden_size * _ITEM_BYTES[model.activation_dtype]
    else:
        token_bytes = n_layers * n_directions * 4
    columns = n_layers * (model.hidden_size if n_directions is None else n_directions)
    statistics = 8 * columns + 4 * n_layers
    beside = BYTES_BESIDE_A_PROMPT * len(prompt_bytes) + BYTES_BESIDE_A_RUN
    return tokens * (token_bytes + 4) + statistics + beside
