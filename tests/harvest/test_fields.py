"""Every field of `POST /v1/harvest`: what is taken, what is refused, with which code and param."""

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pytest_django import Settings

from acsinfra.core.errors import ApiError
from harvest.plans import plan_harvest
from harvest.serializers import HarvestRequestSerializer
from harvest.services import HarvestPlan
from inference.selectors import CatalogueModel
from tests.inference.tensor_json import bfloat16_bits, tensor_json

MODEL = CatalogueModel(
    id=1,
    name="tiny",
    served_model_name="tiny-llama",
    created=0,
    n_layers=4,
    hidden_size=8,
    vocab_size=640,
    max_model_len=512,
    activation_dtype="float32",
    bos_token_id=0,
    has_harvest=True,
    tokenizer_sha256="",
    load_seconds=1.0,
    inference_live=0,
    inference_starting=0,
    loading_for=None,
)


def plan(model: CatalogueModel = MODEL, /, **fields: Any) -> HarvestPlan:
    body = {"model": "tiny", "prompts": ["a"], **fields}
    return plan_harvest(HarvestRequestSerializer.validated(body), model)


def refusal(model: CatalogueModel = MODEL, /, **fields: Any) -> tuple[str, str | None, str]:
    with pytest.raises(ApiError) as caught:
        plan(model, **fields)
    assert caught.value.status == 400
    return caught.value.code.value, caught.value.param, caught.value.message


def tensor(values: np.ndarray[Any, Any], *, compression: str | None = None, **changes: Any) -> dict[str, Any]:
    return {**tensor_json(values, compression=compression), **changes}


def test_the_defaults() -> None:
    made = plan()
    assert (made.layers, made.shard_size, made.batch_size) == ((1, 2, 3), 32, None)
    assert made.add_special_tokens is True
    assert made.directions is None


@pytest.mark.parametrize(
    ("n_layers", "expected"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (1, 2, 3)), (30, (7, 15, 22)), (32, (8, 16, 24)), (126, (31, 63, 94))],
)
def test_left_out_layers_are_the_quartiles(n_layers: int, expected: tuple[int, ...]) -> None:
    assert plan(msgspec.structs.replace(MODEL, n_layers=n_layers)).layers == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("all", (0, 1, 2, 3)), ([3, 0], (0, 3)), ([2, 2, 1, 2], (1, 2)), ([0] * 256, (0,)), (None, (1, 2, 3))],
)
def test_layers_come_in_any_order_and_repeats_are_read_once(given: Any, expected: tuple[int, ...]) -> None:
    assert plan(layers=given).layers == expected


def test_tokens_are_reserved_by_utf8_bytes_and_one_more_each() -> None:
    prompts = ["a", "é", "日本", "👩‍🚀", " "]
    expected = sum(len(prompt.encode()) + 1 for prompt in prompts)
    assert plan(prompts=prompts).reserved_tokens == expected == 26
    assert plan(prompts=prompts, add_special_tokens=False).reserved_tokens == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "a"}, "prompts"),
        ({"prompts": {"0": "a"}}, "prompts"),
        ({"prompts": ["a"] * 4_097}, "prompts"),
        ({"prompts": ["a", ""]}, "prompts.1"),
        ({"prompts": ["a", 5]}, "prompts.1"),
        ({"prompts": [["a"]]}, "prompts.0"),
        ({"prompts": [[1, 2]]}, "prompts.0"),
        ({"prompts": ["a", "b\0"]}, "prompts.1"),
        ({"prompts": ["\ud800"]}, "prompts.0"),
        ({"prompts": None}, "prompts"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"layers": []}, "layers"),
        ({"layers": "ALL"}, "layers"),
        ({"layers": "1"}, "layers"),
        ({"layers": 1}, "layers"),
        ({"layers": True}, "layers"),
        ({"layers": [0] * 257}, "layers"),
        ({"layers": [1, 4]}, "layers.1"),
        ({"layers": [1, -1]}, "layers.1"),
        ({"layers": [1.0]}, "layers.0"),
        ({"layers": [True]}, "layers.0"),
        ({"layers": ["1"]}, "layers.0"),
        ({"layers": [10**30]}, "layers.0"),
        ({"shard_size": 0}, "shard_size"),
        ({"shard_size": 4_097}, "shard_size"),
        ({"shard_size": 1.0}, "shard_size"),
        ({"shard_size": True}, "shard_size"),
        ({"shard_size": "32"}, "shard_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 65}, "batch_size"),
        ({"batch_size": "8"}, "batch_size"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"add_special_tokens": "true"}, "add_special_tokens"),
        ({"promts": ["a"]}, "promts"),
        ({"project_onto": [1.0]}, "project_onto"),
        ({"project_onto": {}}, "project_onto.data"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    code, named, message = refusal(**fields)
    assert (code, named) == ("invalid_request", param)
    assert message.startswith(param)


def test_null_in_an_optional_field_is_the_same_as_leaving_it_out() -> None:
    optional = ("layers", "shard_size", "batch_size", "add_special_tokens", "project_onto")
    assert plan(**dict.fromkeys(optional)) == plan()


def test_the_most_of_everything_is_taken() -> None:
    made = plan(prompts=["a"] * 4_096, layers=[0] * 256, shard_size=4_096, batch_size=64)
    assert (len(made.prompts), made.shard_size, made.batch_size) == (4_096, 4_096, 64)
    assert plan(prompts=["a" * 8_000_000]).reserved_tokens == 8_000_001


def test_more_characters_than_a_job_takes_are_counted() -> None:
    code, param, message = refusal(prompts=["ä" * 4_000_000, "ä" * 4_000_001])
    assert (code, param) == ("corpus_too_large", "prompts")
    assert "8,000,001" in message
    assert "8,000,000" in message


def test_more_bytes_than_a_job_may_write_are_refused_with_both_numbers(settings: Settings) -> None:
    bytes_at_most = plan(prompts=["abc"] * 10, layers="all").bytes_at_most
    settings.HARVEST_MAX_BYTES = bytes_at_most
    plan(prompts=["abc"] * 10, layers="all")
    settings.HARVEST_MAX_BYTES = bytes_at_most - 1
    code, param, message = refusal(prompts=["abc"] * 10, layers="all")
    assert (code, param) == ("corpus_too_large", "prompts")
    assert f"{bytes_at_most:,}" in message
    assert f"{bytes_at_most - 1:,}" in message


def test_a_long_prompt_counts_the_bytes_of_its_first_tokens_alone() -> None:
    assert plan(prompts=["a" * 511]).bytes_at_most == plan(prompts=["a" * 1_000_000]).bytes_at_most


def test_a_model_whose_harvest_is_off_is_unsupported() -> None:
    code, param, _ = refusal(msgspec.structs.replace(MODEL, has_harvest=False), layers=[99])
    assert (code, param) == ("harvest_unsupported", "model")


@pytest.mark.parametrize("compression", [None, "none", "zstd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_directions_are_taken_in_each_dtype(dtype: str, compression: str | None) -> None:
    values = np.arange(1, 17, dtype=np.float32).reshape(2, 8) / 4
    sent: dict[str, np.ndarray[Any, Any]] = {
        "float32": values,
        "float16": values.astype(np.float16),
        "bfloat16": bfloat16_bits(values),
    }
    made = plan(project_onto=tensor(sent[dtype], compression=compression))
    assert made.directions == values.tobytes()


def test_projections_write_fewer_bytes() -> None:
    directions = tensor(np.ones((1, 8), np.float32))
    text = {"prompts": ["a" * 500] * 100}
    assert plan(**text, project_onto=directions).bytes_at_most < plan(**text).bytes_at_most / 3


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"shape": [8]}, "project_onto.shape", "directions"),
        ({"shape": [1, 8, 1]}, "project_onto.shape", "directions"),
        ({"shape": [8, 1]}, "project_onto.shape", "hidden"),
        ({"shape": [65, 8]}, "project_onto.shape", "64"),
        ({"shape": [0, 8]}, "project_onto.shape.0", ""),
        ({"shape": [2, 8]}, "project_onto.data", "64"),
        ({"data": "?"}, "project_onto.data", "base64"),
        ({"data": ""}, "project_onto.data", "32"),
        ({"compression": "gzip"}, "project_onto.compression", "zstd"),
        ({"compression": "zstd", "data": "AAAA"}, "project_onto.data", "zstd"),
        ({"dtype": "float64"}, "project_onto.dtype", "float32"),
        ({"dtype": "int16", "original_dtype": "torch.int16"}, "project_onto.original_dtype", "torch.bfloat16"),
        ({"extra": 1}, "project_onto.extra", "known"),
    ],
)
def test_wrong_directions_are_named(changes: dict[str, Any], param: str, words: str) -> None:
    code, named, message = refusal(project_onto=tensor(np.ones((1, 8), np.float32), **changes))
    assert (code, named) == ("invalid_request", param)
    assert words in message


def test_directions_without_length_or_end_are_refused() -> None:
    zero = np.ones((3, 8), np.float32)
    zero[1] = -0.0
    assert refusal(project_onto=tensor(zero))[1:] == (
        "project_onto.data",
        "project_onto.data holds only zeros in the 32 bytes of direction 1, which has no length to scale.",
    )
    for value in (np.nan, np.inf):
        wrong = np.ones((1, 8), np.float32)
        wrong[0, 3] = value
        assert refusal(project_onto=tensor(wrong))[1] == "project_onto.data"


def test_a_small_body_that_would_expand_to_gigabytes_is_refused() -> None:
    bomb = base64.b64encode(zstandard.compress(bytes(256 * 1024 * 1024))).decode()
    given = tensor(np.ones((64, 8), np.float32), compression="zstd", data=bomb)
    code, param, message = refusal(project_onto=given)
    assert (code, param) == ("invalid_request", "project_onto.data")
    assert "2,048" in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from([*HarvestRequestSerializer().fields, "unknown"])
good = {"model": "tiny", "prompts": ["a", "b"], "layers": [0, 3], "shard_size": 2}


@examples(max_examples=500, deadline=None)
@given(st.dictionaries(names, json_values, max_size=4))
def test_whatever_is_sent_is_planned_or_refused_by_name(changes: dict[str, Any]) -> None:
    body = {**good, **changes}
    made, refused = outcome(body)
    if made is None:
        assert refused is not None
        assert refused.status == 400
        assert refused.param is not None
        assert refused.param.split(".")[0] in body
        json.dumps(refused.body())
    else:
        assert set(made.layers) <= set(range(4))
        assert 1 <= made.shard_size <= 4_096
        assert made.reserved_tokens == sum(len(prompt.encode()) + 1 for prompt in made.prompts)


def outcome(body: dict[str, Any]) -> tuple[HarvestPlan | None, ApiError | None]:
    try:
        return plan_harvest(HarvestRequestSerializer.validated(body), MODEL), None
    except ApiError as error:
        return None, error


@examples(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1))
def test_any_text_is_kept_as_it_is(prompts: list[str]) -> None:
    assert plan(prompts=prompts).prompts == prompts
