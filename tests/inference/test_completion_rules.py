"""Lengths, activations and steering: the rules of POST /v1/completions that need the model or its tokens."""

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from acsinfra.core.errors import ApiError
from inference.completions import prepare_completion
from inference.wire import CompletionWork
from tests.inference.conftest import Preparer
from tests.inference.tensor_json import bfloat16_bits, tensor_json

pytestmark = pytest.mark.django_db
CONTEXT, N_LAYERS, HIDDEN = 512, 4, 64


def _vector(shape: tuple[int, ...] = (1, HIDDEN), **fields: Any) -> dict[str, Any]:
    return {"activations": tensor_json(np.full(shape, 0.5, "<f4")), "layer_indices": list(range(shape[0])), **fields}


def _refusal(prepare: Preparer, **fields: Any) -> tuple[str, str | None]:
    error = prepare.refused(**fields)
    assert error.status == 400
    assert len(error.message) < 400
    return error.code.value, error.param


# Lengths


def test_the_prompt_and_max_tokens_may_fill_the_context_exactly(prepare: Preparer) -> None:
    assert prepare(prompt=[1] * 500, max_tokens=12).hold_tokens == CONTEXT
    error = prepare.refused(prompt=[1] * 500, max_tokens=13)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "513" in error.message
    assert "512" in error.message


def test_a_prompt_that_leaves_no_room_is_refused_by_its_index(prepare: Preparer) -> None:
    assert prepare(prompt=[1] * 511).sampling.max_tokens == 1
    assert _refusal(prepare, prompt=[1] * 512) == ("context_length_exceeded", "prompt")
    assert _refusal(prepare, prompt=[[1], [1] * 512], max_tokens=1) == ("context_length_exceeded", "prompt.1")
    assert _refusal(prepare, prompt=[1] * 512, max_tokens=0, echo=True) == ("context_length_exceeded", "prompt")
    assert prepare(prompt=[1] * 511, max_tokens=0, echo=True).sampling.max_tokens == 0


def test_the_longest_of_several_prompts_decides(prepare: Preparer) -> None:
    fields = {"prompt": [[1] * 3, [1] * 500, [1]], "max_tokens": 13}
    assert _refusal(prepare, **fields) == ("context_length_exceeded", "max_tokens")


def test_the_default_max_tokens_is_at_most_32000(prepare: Preparer) -> None:
    assert prepare.of(max_model_len=100_000)(prompt=[1, 2]).sampling.max_tokens == 32_000


def test_an_operator_may_lower_the_context(prepare: Preparer) -> None:
    lowered = prepare.of(max_model_len=16)
    assert lowered(prompt=[1] * 10).sampling.max_tokens == 6
    assert _refusal(lowered, prompt=[1] * 10, max_tokens=7) == ("context_length_exceeded", "max_tokens")


def test_a_start_token_is_the_tokenizers_and_can_be_left_out(prepare: Preparer) -> None:
    with_start = prepare(prompt="The sky", max_tokens=1).prompts[0]
    without = prepare(prompt="The sky", max_tokens=1, add_special_tokens=False).prompts[0]
    assert with_start == (prepare.model.bos_token_id, *without)


def test_the_embeddings_bound_the_tokenizer_too(prepare: Preparer) -> None:
    assert _refusal(prepare.of(vocab_size=10), prompt=["a"], max_tokens=1) == ("invalid_request", "prompt.0")


@pytest.mark.parametrize("text", ["a" * 10_000_000, " " * 10_000_000, "The sky is blue. " * 600_000, "é" * 5_000_000])
def test_a_text_of_ten_megabytes_is_refused_at_once(prepare: Preparer, text: str) -> None:
    began = time.process_time()
    assert _refusal(prepare, prompt=text) == ("context_length_exceeded", "prompt")
    assert _refusal(prepare, prompt=["a", text], max_tokens=1) == ("context_length_exceeded", "prompt.1")
    # This process's own time, of all its threads: what else the machine does is not in it.
    assert time.process_time() - began < 2


def prepare_beside_others(body: dict[str, Any], prepare: Preparer) -> CompletionWork | ApiError:
    """Assert that a large body holds up the event loop for a small part of its time only, and return the outcome.

    One of three measurements is enough: a busy machine may hold up any of them, but the code itself would all.
    """
    for _ in range(3):
        began, used = time.monotonic(), time.process_time()
        gap, outcome = prepare.runner.run(longest_gap(body, prepare))
        assert time.process_time() - used < 5
        if gap < max(0.2, (time.monotonic() - began) / 3):
            return outcome
    raise AssertionError(f"The event loop was held up for {gap} s.")


async def longest_gap(body: dict[str, Any], prepare: Preparer) -> tuple[float, CompletionWork | ApiError]:
    """How long the event loop was held up at a time, in seconds, while a large body was prepared; and the outcome."""
    task = asyncio.create_task(prepare_completion(body, catalogue=prepare.catalogue, request_id="req", is_large=True))
    gap, before = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        gap, before = max(gap, time.monotonic() - before), time.monotonic()
    error = task.exception()
    assert error is None or isinstance(error, ApiError)
    return gap, error or task.result()


def test_a_long_text_does_not_hold_up_the_event_loop(prepare: Preparer) -> None:
    large = prepare.of(max_model_len=4_000_000)
    body = {"model": "tiny", "prompt": "The capital of France is Paris. " * 12_000, "max_tokens": 1}
    work = prepare_beside_others(body, large)
    assert isinstance(work, CompletionWork)
    assert len(work.prompts[0]) > 50_000


def _spanned(n_spans: int) -> dict[str, Any]:
    spans = [[start, start + 1] for start in range(n_spans)]
    return {"prompt": "The", "apply_steering_vectors": [_vector(position_spans=spans)]}


@pytest.mark.parametrize("fields", [{"prompt": [1] * 2_000_000}, _spanned(400_000)], ids=["token ids", "spans"])
def test_a_body_of_megabytes_does_not_hold_up_the_event_loop(prepare: Preparer, fields: dict[str, Any]) -> None:
    refusal = prepare_beside_others({"model": "tiny", "max_tokens": 1, **fields}, prepare)
    assert isinstance(refusal, ApiError)
    assert refusal.status == 400


# The whole vocabulary


def test_the_whole_vocabulary_is_taken_for_short_prompts_only(prepare: Preparer, settings: Any) -> None:
    settings.FULL_VOCAB_MAX_PROMPT_TOKENS = 5
    assert prepare(prompt=[1] * 5, max_tokens=1, prompt_logprobs=-1).sampling.prompt_logprobs == -1
    error = prepare.refused(prompt=[1] * 6, max_tokens=1, prompt_logprobs=-1)
    assert (error.code, error.status, error.param) == ("full_vocab_prompt_too_long", 400, "prompt")
    assert "5" in error.message
    assert "6" in error.message
    batch = {"prompt": [[1] * 3, [1] * 3], "max_tokens": 1, "prompt_logprobs": -1}
    assert _refusal(prepare, **batch) == ("full_vocab_prompt_too_long", "prompt.1")
    assert prepare(prompt=[1] * 6, max_tokens=1, prompt_logprobs=100).sampling.prompt_logprobs == 100


def test_a_large_vocabulary_is_taken_whole_for_fewer_prompt_tokens(prepare: Preparer, settings: Any) -> None:
    settings.FULL_VOCAB_MAX_LOGPROBS = 49
    assert prepare.of(vocab_size=10)(prompt=[1] * 4, max_tokens=1, prompt_logprobs=-1).sampling.prompt_logprobs == -1
    assert (
        _refusal(prepare.of(vocab_size=10), prompt=[1] * 5, max_tokens=1, prompt_logprobs=-1)[0]
        == "full_vocab_prompt_too_long"
    )
    twice = {"prompt": [1] * 3, "max_tokens": 1, "n": 2, "prompt_logprobs": -1}
    assert _refusal(prepare, **twice) == ("full_vocab_prompt_too_long", "prompt")


# Activations


def test_layers_are_captured_ascending(prepare: Preparer) -> None:
    assert prepare(output_residual_stream=True).capture_layers == (0, 1, 2, 3)
    assert prepare(output_residual_stream=[3, 0]).capture_layers == (0, 3)
    assert prepare(output_residual_stream=False).capture_layers == ()


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (1, ""),
        ("all", ""),
        ([], ""),
        ({}, ""),
        ([0] * 257, ""),
        ([0, 0], ".1"),
        ([1, 2, 1], ".2"),
        ([4], ".0"),
        ([0, 9], ".1"),
        ([-1], ".0"),
        ([True], ".0"),
        ([1.0], ".0"),
        (["0"], ".0"),
        ([None], ".0"),
        ([10**30], ".0"),
    ],
)
def test_layers_that_are_no_layers_are_refused(prepare: Preparer, value: Any, param: str) -> None:
    name = f"output_residual_stream{param}"
    assert _refusal(prepare, output_residual_stream=value) == ("invalid_request", name)


def test_a_capture_takes_one_prompt_and_one_answer_unstreamed(prepare: Preparer) -> None:
    refused = ("invalid_request", "output_residual_stream")
    for asked in (True, [0]):
        assert _refusal(prepare, output_residual_stream=asked, stream=True) == refused
        assert _refusal(prepare, output_residual_stream=asked, n=2, max_tokens=1) == refused
        assert _refusal(prepare, output_residual_stream=asked, prompt=["a", "b"], max_tokens=1) == refused
    assert prepare(output_residual_stream=False, stream=True).stream
    assert prepare(output_residual_stream=[0], prompt=["a"]).capture_layers == (0,)


def test_the_prompts_cap_grows_as_fewer_layers_are_asked_for(prepare: Preparer, settings: Any) -> None:
    # float32: 1,024 bytes a token at 4 layers of 64
    settings.MAX_ACTIVATION_BYTES = 10 * 1024 + 1023
    assert prepare.model.max_activation_prompt_tokens == 10
    for layers, cap in ((True, 10), ([0, 1, 2], 13), ([0, 3], 20), ([2], 40)):
        fields = {"output_residual_stream": layers, "max_tokens": 1}
        assert len(prepare(prompt=[1] * cap, **fields).prompts[0]) == cap
        error = prepare.refused(prompt=[1] * (cap + 1), **fields)
        assert (error.code, error.status, error.param) == ("activation_prompt_too_long", 400, "prompt")
        assert f"at most {cap} " in error.message


def test_the_cap_is_the_context_at_most(prepare: Preparer) -> None:
    assert prepare.model.max_activation_prompt_tokens == CONTEXT
    assert _refusal(prepare, prompt=[1] * 513, output_residual_stream=[0]) == ("context_length_exceeded", "prompt")


def test_the_whole_capture_stays_within_its_bytes_with_what_is_generated(prepare: Preparer, settings: Any) -> None:
    settings.MAX_ACTIVATION_BYTES = 10 * 1024
    work = prepare(prompt=[1] * 4, output_residual_stream=True)
    assert len(work.prompts[0]) + work.sampling.max_tokens - 1 == 10
    assert prepare(prompt=[1] * 4, output_residual_stream=True, max_tokens=7).sampling.max_tokens == 7
    refused = _refusal(prepare, prompt=[1] * 4, output_residual_stream=True, max_tokens=8)
    assert refused == ("invalid_request", "max_tokens")


# Steering


def test_a_vector_reaches_the_engine_as_it_was_sent(prepare: Preparer) -> None:
    array = np.random.default_rng(0).normal(size=(2, HIDDEN)).astype("<f4")
    vector = {"activations": tensor_json(array), "layer_indices": [3, 1], "scale": -2, "norm_match": True}
    work = prepare(apply_steering_vectors=[vector])
    (steering,) = work.steering
    assert steering.data == array.tobytes()
    assert (steering.dtype, steering.shape, steering.layer_indices) == ("float32", (2, HIDDEN), (3, 1))
    assert (steering.scale, steering.norm_match) == (-2.0, True)
    assert (steering.position_indices, steering.position_spans) == (None, None)
    assert work.is_steered


def test_the_three_dtypes_and_the_order_of_vectors(prepare: Preparer) -> None:
    array = np.linspace(-1, 1, HIDDEN, dtype="<f4").reshape(1, HIDDEN)
    coded = (array, array.astype("<f2"), bfloat16_bits(array))
    vectors = [{"activations": tensor_json(item, compression="none"), "layer_indices": [0]} for item in coded]
    work = prepare(apply_steering_vectors=vectors)
    assert [item.dtype for item in work.steering] == ["float32", "float16", "bfloat16"]
    assert [item.data for item in work.steering] == [item.tobytes() for item in coded]


def test_scale_zero_is_dropped_and_still_counts_as_steered(prepare: Preparer) -> None:
    work = prepare(apply_steering_vectors=[_vector(scale=0), _vector(scale=-0.0)])
    assert (work.steering, work.is_steered) == ((), True)
    assert [item.scale for item in prepare(apply_steering_vectors=[_vector(scale=0), _vector()]).steering] == [1.0]
    # It is checked like any other.
    bad = _vector(scale=0)
    bad["activations"]["data"] = "!"
    assert _refusal(prepare, apply_steering_vectors=[bad])[1] == "apply_steering_vectors.0.activations.data"


@pytest.mark.parametrize(
    ("vector", "param"),
    [
        ({"layer_indices": [0]}, "activations"),
        ({"activations": None, "layer_indices": [0]}, "activations"),
        ({"activations": [], "layer_indices": [0]}, "activations"),
        ({"activations": tensor_json(np.ones((1, HIDDEN), "<f4"))}, "layer_indices"),
        (_vector(layer_indices=[]), "layer_indices"),
        (_vector(layer_indices=0), "layer_indices"),
        (_vector(layer_indices=[-1]), "layer_indices.0"),
        (_vector(layer_indices=[True]), "layer_indices.0"),
        (_vector(layer_indices=[N_LAYERS]), "layer_indices.0"),
        (_vector((2, HIDDEN), layer_indices=[1, N_LAYERS]), "layer_indices.1"),
        (_vector((2, HIDDEN), layer_indices=[1, 1]), "layer_indices.1"),
        (_vector(layer_indices=[0, 1]), "activations.shape"),
        (_vector((1, HIDDEN - 1)), "activations.shape"),
        (_vector((HIDDEN,), layer_indices=[0]), "activations.shape"),
        (_vector(scale="1"), "scale"),
        (_vector(scale=True), "scale"),
        (_vector(scale=math.nan), "scale"),
        (_vector(scale=math.inf), "scale"),
        (_vector(scale=1e6 + 1), "scale"),
        (_vector(scale=-1e6 - 1), "scale"),
        (_vector(scale=10**400), "scale"),
        (_vector(norm_match=1), "norm_match"),
        (_vector(more=1), "more"),
        (_vector((1, 2, HIDDEN)), "position_indices"),
        (_vector(position_indices=[0]), "position_indices"),
        (_vector((1, 2, HIDDEN), position_indices=[0]), "activations.shape"),
        (_vector((1, 2, HIDDEN), position_indices=[]), "position_indices"),
        (_vector((1, 2, HIDDEN), position_indices=[0, 0]), "position_indices.1"),
        (_vector((1, 2, HIDDEN), position_indices=[0, -1]), "position_indices.1"),
        (_vector((1, 2, HIDDEN), position_indices=[0, 1.0]), "position_indices.1"),
        (_vector((1, 2, HIDDEN), position_indices=[0, 1], position_spans=[[0, 1]]), "position_spans"),
        (_vector((1, 2, HIDDEN), position_spans=[[0, 1]]), "position_spans"),
        (_vector(position_spans=[]), "position_spans"),
        (_vector(position_spans=[0, 1]), "position_spans.0"),
        (_vector(position_spans=[[0]]), "position_spans.0"),
        (_vector(position_spans=[[0, 1, 2]]), "position_spans.0"),
        (_vector(position_spans=[[0, 1], [1, 1]]), "position_spans.1"),
        (_vector(position_spans=[[2, 1]]), "position_spans.0"),
        (_vector(position_spans=[[-1, 1]]), "position_spans.0.0"),
        (_vector(position_spans=[[0, True]]), "position_spans.0.1"),
        (_vector(position_spans=[[2, 4], [0, 3]]), "position_spans.0"),
        (_vector(position_spans=[[0, 2], [0, 2]]), "position_spans.1"),
    ],
)
def test_a_malformed_vector_is_refused_where_it_is_wrong(prepare: Preparer, vector: Any, param: str) -> None:
    expected = ("invalid_request", f"apply_steering_vectors.1.{param}")
    assert _refusal(prepare, apply_steering_vectors=[_vector(), vector]) == expected


@pytest.mark.parametrize("value", [[], {}, 1, "a", True, [_vector()] * 9])
def test_one_to_eight_vectors(prepare: Preparer, value: Any) -> None:
    assert _refusal(prepare, apply_steering_vectors=value) == ("invalid_request", "apply_steering_vectors")
    assert len(prepare(apply_steering_vectors=[_vector()] * 8).steering) == 8


def test_steering_takes_one_prompt_and_one_answer_and_may_be_streamed(prepare: Preparer) -> None:
    refused = ("invalid_request", "apply_steering_vectors")
    assert _refusal(prepare, apply_steering_vectors=[_vector()], n=2, max_tokens=1) == refused
    assert _refusal(prepare, apply_steering_vectors=[_vector()], prompt=["a", "b"], max_tokens=1) == refused
    assert prepare(apply_steering_vectors=[_vector()], stream=True).is_steered


def test_positions_reach_to_the_last_that_goes_through_the_model(prepare: Preparer) -> None:
    fields: dict[str, Any] = {"prompt": [1] * 5, "max_tokens": 3}  # positions 0 to 6 go through
    at = [_vector((1, 2, HIDDEN), position_indices=[6, 0])]
    assert prepare(**fields, apply_steering_vectors=at).steering[0].position_indices == (6, 0)
    past = [_vector((1, 2, HIDDEN), position_indices=[0, 7])]
    error = ("invalid_request", "apply_steering_vectors.0.position_indices.1")
    assert _refusal(prepare, **fields, apply_steering_vectors=past) == error
    spans = [_vector(position_spans=[[5, 7], [0, 2]])]
    assert prepare(**fields, apply_steering_vectors=spans).steering[0].position_spans == ((5, 7), (0, 2))
    past = [_vector(position_spans=[[0, 2], [5, 8]])]
    error = ("invalid_request", "apply_steering_vectors.0.position_spans.1.1")
    assert _refusal(prepare, **fields, apply_steering_vectors=past) == error
    # Where only the prompt is scored, its last position goes through all the same.
    scored: dict[str, Any] = {"prompt": [1] * 5, "max_tokens": 0, "echo": True}
    assert prepare(**scored, apply_steering_vectors=[_vector(position_spans=[[0, 5]])]).is_steered
    past = [_vector(position_spans=[[0, 6]])]
    assert _refusal(prepare, **scored, apply_steering_vectors=past)[0] == "invalid_request"


def test_norm_match_refuses_a_zero_vector(prepare: Preparer) -> None:
    array = np.ones((1, 2, HIDDEN), "<f4")
    array[0, 1] = 0
    for coded in (array, array.astype("<f2"), bfloat16_bits(array)):
        vector = {"activations": tensor_json(coded), "layer_indices": [0], "position_indices": [0, 1]}
        assert prepare(apply_steering_vectors=[vector]).is_steered
        refused = _refusal(prepare, apply_steering_vectors=[{**vector, "norm_match": True}])
        assert refused == ("invalid_request", "apply_steering_vectors.0.activations.data")


def test_vectors_that_claim_gigabytes_are_refused_before_they_are_decoded(prepare: Preparer) -> None:
    vector = _vector((1, 1, HIDDEN), position_indices=list(range(131_073)))
    vector["activations"]["shape"] = [1, 131_073, HIDDEN]
    refused = _refusal(prepare, apply_steering_vectors=[vector])
    assert refused == ("invalid_request", "apply_steering_vectors.0.activations.shape")
    vector["activations"]["shape"] = [1, 10**18, HIDDEN]
    assert _refusal(prepare, apply_steering_vectors=[vector])[1] == "apply_steering_vectors.0.activations.shape"
