"""Only what no schema can say is excused, and what the API says of it is known by its words."""

import base64
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from acsinfra.core.fields import FieldFault
from inference.steering import SteeringVectorSerializer, check_against_model, check_positions, decode_vectors
from tests.reference.unsayable_rules import is_unsayable

TINY: Any = SimpleNamespace(name="tiny", n_layers=4, hidden_size=64)
ONES = b"\0\0\x80?"


def _check(vector: dict[str, Any]) -> None:
    """Check a vector in every way, for a prompt and answer of five positions."""
    checked = SteeringVectorSerializer.check(vector)
    check_against_model([checked], TINY)
    check_positions([checked], 4)
    decode_vectors([checked])


def _tensor(*shape: int, data: bytes = ONES * 64, **fields: Any) -> dict[str, Any]:
    return {"data": base64.b64encode(data).decode(), "dtype": "float32", "shape": list(shape), **fields}


@pytest.mark.parametrize(
    ("code", "param", "message", "is_excused"),
    [
        ("invalid_request", "best_of", "best_of must be null or equal to n (2): vLLM dropped best_of.", True),
        ("invalid_request", "prompt.3.0", "prompt.3.0 is token id 70000, and the vocabulary's ids are 0 to 511.", True),
        ("model_not_found", "model", "The model 'x' does not exist here.", True),
        # The rule of another field, a rule and more, a fault that the schema says, a code at another field.
        ("invalid_request", "n", "n must be null or equal to n (2): vLLM dropped best_of.", False),
        ("invalid_request", "best_of", "best_of must be null or equal to n (2): vLLM dropped best_of. Past it.", False),
        ("invalid_request", "max_tokens", "max_tokens must be at least 0 and at most 32,000.", False),
        ("invalid_request", "stream", "stream is not a known field.", False),
        ("invalid_request", None, "The body must be a JSON object.", False),
        ("model_not_found", "prompt", "The model 'x' does not exist here.", False),
        ("bad_json", "best_of", "best_of must be null or equal to n (2): vLLM dropped best_of.", False),
    ],
)
def test_only_a_rule_that_no_schema_can_say_is_excused(
    code: str, param: str | None, message: str, is_excused: bool
) -> None:
    error = {"code": code, "param": param, "message": message}
    assert is_unsayable(error, path="/v1/completions") is is_excused


@pytest.mark.parametrize(
    "vector",
    [
        {"activations": _tensor(64)},
        {"activations": _tensor(2, 64)},
        {"activations": _tensor(1, 63)},
        {"activations": _tensor(1, 64), "layer_indices": [9]},
        {"activations": _tensor(1, 2**40)},
        {"activations": _tensor(1, 64, data=ONES)},
        {"activations": _tensor(1, 64) | {"data": "@@@"}},
        {"activations": _tensor(1, 64, data=zstandard.compress(bytes(1_000)), compression="zstd")},
        {"activations": _tensor(1, 64, data=zstandard.compress(bytes(256))[:-1], compression="zstd")},
        {"activations": _tensor(1, 64, data=ONES, compression="zstd")},
        {"activations": _tensor(1, 64, data=b"\0\0\xc0\x7f" * 64)},
        {"activations": _tensor(1, 64, data=bytes(256)), "norm_match": True},
        {"activations": _tensor(1, 64, dtype="int16")},
        {"activations": _tensor(1, 64, original_dtype="torch.float16")},
        {"activations": _tensor(1, 1, 64)},
        {"activations": _tensor(1, 64), "position_indices": [0]},
        {"activations": _tensor(1, 1, 64), "position_indices": [0, 1]},
        {"activations": _tensor(1, 1, 64), "position_spans": [[0, 1]]},
        {"activations": _tensor(1, 1, 64), "position_indices": [9]},
        {"activations": _tensor(1, 64), "position_spans": [[2, 1]]},
        {"activations": _tensor(1, 64), "position_spans": [[0, 2], [1, 3]]},
        {"activations": _tensor(1, 64), "position_spans": [[0, 9]]},
        {"activations": _tensor(1, 64), "position_spans": [[0, 1]], "position_indices": [0]},
    ],
)
def test_each_refusal_of_a_steering_vector_is_one_of_the_rules(vector: dict[str, Any]) -> None:
    with pytest.raises(FieldFault) as refused:
        _check({"layer_indices": [1], **vector})
    fault = refused.value
    assert fault.param is not None
    param = "apply_steering_vectors.0." + fault.param.removeprefix("0.")
    error = {"code": "invalid_request", "param": param, "message": f"{param} {fault.message}"}
    assert is_unsayable(error, path="/v1/completions"), error["message"]
