"""Hooks of schemathesis: valid cases that a live API can take, and which 400s a schema cannot say.

Half of the valid cases are repaired so that they fit the tiny model and the rules between fields, and must be accepted.
The rest go as they were generated: a 400 is right there when it is one of `tests.reference.unsayable_rules`.
"""

import base64
import struct
import zlib
from typing import Any, Final

import schemathesis
from schemathesis.generation import GenerationMode

from tests.reference.unsayable_rules import is_unsayable

MODEL: Final = "tiny"
LAYERS: Final = 4
HIDDEN: Final = 64
# Below the vocabulary of any model; what a test generates must not hold an engine up.
TOKEN_IDS: Final = 500
TOKENS_AT_MOST: Final = 4


def _is_positive(case: Any) -> bool:
    return case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Name the live model, and repair half of the valid cases."""
    if not _is_positive(case) or not isinstance(case.body, dict):
        return
    # JSON Schema takes 57.0 for an integer, the API does not.
    body = case.body = _without_integral_floats(case.body)
    if "prompt" in body or "prompts" in body:
        body["model"] = MODEL
    if zlib.crc32(repr(sorted(body, key=str)).encode()) % 2:
        if "prompt" in body:
            _repair_completion(body, is_job=case.operation.path.endswith("completion-jobs"))
        elif "prompts" in body:
            _repair_harvest(body)


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Keep a failure, but for a valid case that was refused by a rule that no schema can say."""
    if type(failure).__name__ != "RejectedPositiveData" or response.status_code != 400:
        return True
    return not is_unsayable(response.json()["error"], path=case.operation.path)


@schemathesis.check
def documented_error_code(ctx: Any, response: Any, case: Any) -> None:
    """An error has a code that the document names for this status of this operation."""
    if response.status_code < 400 or case.method.lower() != case.operation.method.lower() or not response.content:
        return
    error = response.json()["error"]
    described = case.operation.definition.raw["responses"].get(str(response.status_code), {}).get("description", "")
    assert f"`{error['code']}`" in described, f"{error['code']} is not documented for {response.status_code}"


def _without_integral_floats(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _without_integral_floats(item) for key, item in value.items()}
    return [_without_integral_floats(item) for item in value] if isinstance(value, list) else value


def _repair_completion(body: dict[str, Any], *, is_job: bool) -> None:
    _repair_prompt(body)
    is_single = bool(body.get("output_residual_stream") or body.get("apply_steering_vectors"))
    if is_single and isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int):
        body["prompt"] = body["prompt"][0]
    body["n"] = 1 if is_single else min(body.get("n") or 1, 2)
    if body.get("best_of") is not None:
        body["best_of"] = body["n"]
    body["max_tokens"] = max(1, (body.get("max_tokens") or 0) % (TOKENS_AT_MOST + 1))
    if body.get("min_tokens"):
        body["min_tokens"] %= body["max_tokens"] + 1
    if is_job or is_single or body.get("prompt_logprobs") is not None:
        body.pop("stream", None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("logprob_token_ids") is not None:
        body["logprobs"] = body.get("logprobs") or 0
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if body.get(name):
            body[name] = [token_id % TOKEN_IDS for token_id in body[name]]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % TOKEN_IDS): bias for key, bias in body["logit_bias"].items()}
    if isinstance(body.get("output_residual_stream"), list):
        body["output_residual_stream"] = sorted({layer % LAYERS for layer in body["output_residual_stream"]})
    for vector in body.get("apply_steering_vectors") or []:
        _repair_vector(vector)


def _repair_prompt(body: dict[str, Any]) -> None:
    prompt = body["prompt"]
    if isinstance(prompt, str):
        body["prompt"] = prompt[:100]
    elif isinstance(prompt[0], str):
        body["prompt"] = [text[:100] for text in prompt[:4]]
    elif isinstance(prompt[0], int):
        body["prompt"] = [token_id % TOKEN_IDS for token_id in prompt[:100]]
    else:
        body["prompt"] = [[token_id % TOKEN_IDS for token_id in ids[:100]] for ids in prompt[:4]]


def _repair_vector(vector: dict[str, Any]) -> None:
    layers = sorted({layer % LAYERS for layer in vector["layer_indices"]})
    vector["layer_indices"] = layers
    if vector.get("position_indices"):
        vector["position_indices"] = [0]
        vector.pop("position_spans", None)
        vector["activations"] = _tensor(len(layers), 1, HIDDEN)
    else:
        vector["activations"] = _tensor(len(layers), HIDDEN)
        if vector.get("position_spans"):
            vector["position_spans"] = [[0, 1]]


def _repair_harvest(body: dict[str, Any]) -> None:
    body["prompts"] = body["prompts"][:4]
    if isinstance(body.get("layers"), list):
        body["layers"] = [layer % LAYERS for layer in body["layers"]]
    if body.get("project_onto") is not None:
        body["project_onto"] = _tensor(2, HIDDEN)


def _tensor(*shape: int) -> dict[str, Any]:
    size = 1
    for length in shape:
        size *= length
    data = struct.pack(f"<{size}f", *(0.01 * (index % 7 + 1) for index in range(size)))
    return {
        "data": base64.b64encode(data).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(shape),
        "compression": "none",
    }
