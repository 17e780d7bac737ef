"""Whatever JSON a body holds, it becomes work within the bounds or an ApiError that names a field: nothing else."""

import base64
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from acsinfra.core.errors import ApiError, ErrorCode
from inference.serializers import CompletionRequestSerializer
from inference.wire import CompletionWork
from tests.inference.conftest import Preparer

pytestmark = pytest.mark.django_db
FIELDS = tuple(CompletionRequestSerializer().fields)
CODES = {
    ErrorCode.INVALID_REQUEST,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.ACTIVATION_PROMPT_TOO_LONG,
    ErrorCode.FULL_VOCAB_PROMPT_TOO_LONG,
}
examples = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

texts = st.text(st.characters(), max_size=30) | st.text(st.characters(categories=["Cs", "Cc", "Lo"]), max_size=4)
numbers = (
    st.integers()
    | st.integers(-3, 700)
    | st.floats()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**63 - 1, 32_000, 32_001, 1e308, 0.0, -0.0])
)
scalars = st.none() | st.booleans() | numbers | texts
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


def _tensor(shape: list[int], scale: float, dtype: str) -> dict[str, Any]:
    raw = np.full(shape, scale, dtype).tobytes()
    data = base64.b64encode(zstandard.ZstdCompressor().compress(raw)).decode()
    return {"data": data, "dtype": np.dtype(dtype).name, "shape": shape, "compression": "zstd"}


tensors = st.builds(
    _tensor,
    st.lists(st.sampled_from([1, 2, 3, 64]), min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0, -3.5]),
    st.sampled_from(["<f4", "<f2"]),
)
vectors = st.fixed_dictionaries(
    {"activations": tensors | json_values, "layer_indices": st.lists(st.integers(-1, 5), max_size=3) | json_values},
    optional={
        "scale": numbers,
        "norm_match": st.booleans() | json_values,
        "position_indices": st.lists(st.integers(-1, 20), max_size=3) | json_values,
        "position_spans": st.lists(st.lists(st.integers(-1, 20), max_size=3), max_size=3) | json_values,
    },
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "prompt": texts | st.lists(texts, max_size=4) | st.lists(st.integers(-1, 700), max_size=20),
    "max_tokens": st.integers(-1, 520),
    "n": st.integers(0, 18),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "logprobs": st.integers(-1, 101),
    "prompt_logprobs": st.integers(-2, 101),
    "logit_bias": st.dictionaries(st.integers(-1, 700).map(str), st.floats(-101, 101), max_size=3),
    "output_residual_stream": st.booleans() | st.lists(st.integers(-1, 5), max_size=5),
    "apply_steering_vectors": st.lists(vectors, max_size=3),
    "stop": texts | st.lists(texts, max_size=5),
}


def _outcome(prepare: Preparer, body: Any) -> CompletionWork | ApiError:
    try:
        return prepare.body(body)
    except ApiError as error:
        return error


def _judge(prepare: Preparer, body: Any) -> CompletionWork | ApiError:
    """Return the work or the refusal of `body`, whichever it is, held to what every one of them promises."""
    outcome = _outcome(prepare, body)
    if isinstance(outcome, ApiError):
        assert outcome.status == 400
        assert outcome.code in CODES
        assert "\0" not in outcome.message
        assert 10 < len(outcome.message.encode()) < 1000
        return outcome
    work = outcome
    assert msgspec.json.decode(msgspec.json.encode(work), type=CompletionWork) == work
    model, sampling = prepare.model, work.sampling
    assert work.prompts
    assert all(0 <= token_id < model.vocab_size for ids in work.prompts for token_id in ids)
    assert all(1 <= len(ids) <= model.max_model_len - max(1, sampling.max_tokens) for ids in work.prompts)
    assert len(work.prompts) * sampling.n * max(1, sampling.max_tokens) <= 32_000
    assert work.hold_tokens == work.prompt_tokens + len(work.prompts) * sampling.n * sampling.max_tokens
    assert sampling.min_tokens <= sampling.max_tokens
    assert sampling.max_tokens or work.echo
    if work.capture_layers or work.is_steered:
        assert (len(work.prompts), sampling.n) == (1, 1)
    assert all(later > earlier for earlier, later in pairwise(work.capture_layers))
    for vector in work.steering:
        itemsize = 4 if vector.dtype == "float32" else 2
        assert len(vector.data) == np.prod(vector.shape) * itemsize
        assert vector.scale
        last = len(work.prompts[0]) + max(1, sampling.max_tokens) - 2
        assert all(position <= last for position in vector.position_indices or ())
        assert all(end - 1 <= last for _, end in vector.position_spans or ())
    return work


def _assert_names(outcome: CompletionWork | ApiError, *roots: str) -> None:
    if isinstance(outcome, ApiError):
        assert outcome.param is not None
        assert outcome.param.partition(".")[0] in roots


@examples
@given(st.sampled_from(FIELDS), st.data())
def test_any_value_in_one_field(prepare: Preparer, field: str, data: st.DataObject) -> None:
    """A refusal names that field, or one whose rule it broke (such as min_tokens over max_tokens)."""
    value = data.draw(likely.get(field, json_values) | json_values)
    outcome = _judge(prepare, {"model": "tiny", "prompt": "The sky is", field: value})
    companions = {"prompt": ("max_tokens",), "n": ("max_tokens",), "max_tokens": ("prompt",)}
    _assert_names(outcome, field, *companions.get(field, ()))


@settings(examples, max_examples=60)
@given(st.fixed_dictionaries({}, optional={name: likely.get(name, json_values) for name in FIELDS if name != "model"}))
@example({"prompt": [0], "max_tokens": 0, "echo": True, "output_residual_stream": [0]})
@example({"prompt": "a", "max_tokens": 500, "min_tokens": 500, "stream": True, "stream_options": {}})
def test_any_values_in_all_fields(prepare: Preparer, fields: dict[str, Any]) -> None:
    _assert_names(_judge(prepare, {"model": "tiny", **fields}), *FIELDS)


@examples
@given(st.fixed_dictionaries({"prompt": likely["prompt"]}, optional={k: v for k, v in likely.items() if k != "prompt"}))
def test_likely_values_in_many_fields(prepare: Preparer, fields: dict[str, Any]) -> None:
    _assert_names(_judge(prepare, {"model": "tiny", **fields}), *FIELDS)


@examples
@given(vectors)
def test_any_steering_vector(prepare: Preparer, vector: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "apply_steering_vectors": [vector]}
    _assert_names(_judge(prepare, body), "apply_steering_vectors")


@examples
@given(json_values | st.dictionaries(texts | st.sampled_from(FIELDS), json_values, max_size=5))
def test_any_body(prepare: Preparer, body: Any) -> None:
    outcome = _judge(prepare, body)
    if isinstance(outcome, ApiError) and isinstance(body, dict):
        assert outcome.param is not None
