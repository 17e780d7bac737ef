"""Captured residual streams against HuggingFace's, whatever else is going on in the engine."""

import asyncio

import numpy as np
import pytest

from inference.engine.activations import CapturedActivations
from inference.engine.errors import RequestFault
from inference.wire import EngineRequest
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    assert_same_stream,
    captured_stream,
    generated_ids,
    make_prompt,
    make_request,
    sequence_read,
)


@pytest.mark.parametrize("layers", [ALL_LAYERS, (2,), (0, 3)])
def test_prompt_and_generated_positions_are_those_of_huggingface(
    roomy: EngineThread, reference: ReferenceModel, layers: tuple[int, ...]
) -> None:
    request = make_request(make_prompt(40), capture=layers, max_tokens=12)
    answer = roomy.answer(request)
    assert captured_stream(answer).shape == (len(layers), 40 + 12 - 1, HIDDEN)
    assert_same_stream(captured_stream(answer), reference.read(sequence_read(request, answer)), layers=layers)


def test_a_prompt_alone_has_a_row_for_each_token(roomy: EngineThread, reference: ReferenceModel) -> None:
    """max_tokens 0 scores the prompt: every one of its tokens goes through the model."""
    request = make_request(make_prompt(17), capture=ALL_LAYERS, max_tokens=0)
    deltas, captured = roomy.answer(request)
    assert [(delta.text, delta.token_ids, delta.finish_reason) for delta in deltas] == [("", (), "length")]
    assert_same_stream(captured_stream((deltas, captured)), reference.read(request.prompt_token_ids))


def test_chunks_of_a_prompt_land_at_their_absolute_positions(cramped: EngineThread, reference: ReferenceModel) -> None:
    request = make_request(make_prompt(300, seed=1), capture=ALL_LAYERS, max_tokens=6)
    answer = cramped.answer(request)
    assert_same_stream(captured_stream(answer), reference.read(sequence_read(request, answer)))


def test_a_prompt_in_the_prefix_cache_is_captured_whole(roomy: EngineThread, reference: ReferenceModel) -> None:
    """Fault 9 of the peer: prompt tokens served from the prefix cache had no activations."""
    prompt = make_prompt(130, seed=2)
    roomy.answer(make_request(prompt))
    roomy.answer(make_request(prompt))
    for _ in range(2):
        request = make_request(prompt, capture=ALL_LAYERS)
        answer = roomy.answer(request)
        assert_same_stream(captured_stream(answer), reference.read(sequence_read(request, answer)))


def test_preempted_requests_are_captured_right(cramped: EngineThread, reference: ReferenceModel) -> None:
    """Fault 2 of the peer: after a preemption captures were silently wrong."""
    before = cramped.describe_workers()[0]["preemptions"]
    requests = [
        make_request(make_prompt(60 + 7 * index, seed=10 + index), capture=ALL_LAYERS, max_tokens=120)
        for index in range(8)
    ]
    answers = cramped.answer_all(requests)
    assert cramped.describe_workers()[0]["preemptions"] - before >= 3
    for request, answer in zip(requests, answers, strict=True):
        assert len(generated_ids(answer)) == 120
        assert_same_stream(captured_stream(answer), reference.read(sequence_read(request, answer)))


@pytest.mark.parametrize("engine_name", ["roomy", "cramped"])
def test_thirty_mixed_requests_at_once(
    engine_name: str, request: pytest.FixtureRequest, reference: ReferenceModel
) -> None:
    engine: EngineThread = request.getfixturevalue(engine_name)
    kinds = ((), ALL_LAYERS, (1,), (0, 2))
    requests = [
        make_request(make_prompt(5 + 6 * index, seed=index), capture=kinds[index % 4], max_tokens=1 + index % 9)
        for index in range(30)
    ]
    for one, answer in zip(requests, engine.answer_all(requests), strict=True):
        assert len(generated_ids(answer)) == one.sampling.max_tokens
        if one.capture_layers:
            expected = reference.read(sequence_read(one, answer))
            assert_same_stream(captured_stream(answer), expected, layers=one.capture_layers)


def test_a_streamed_capture_is_complete(roomy: EngineThread, reference: ReferenceModel) -> None:
    """Fault 5 of the peer: streamed answers lost activations. Each delta comes by itself, the capture after them."""

    async def stream(request: EngineRequest) -> list[object]:
        items: list[object] = []
        async for item in roomy.engine.generate(request):
            items.append(item)
            await asyncio.sleep(0.002)
        return items

    # So many that they come one by one, or a few at a time, however busy the reader is.
    one = make_request(make_prompt(20), capture=(1, 3), max_tokens=120)
    items = roomy.run(stream(one))
    assert len(items) > 3
    *deltas, captured = items
    assert isinstance(captured, CapturedActivations)
    ids = [token_id for delta in deltas for token_id in delta.token_ids]  # type: ignore[attr-defined]
    assert len(ids) == 120
    expected = reference.read((*one.prompt_token_ids, *ids[:-1]))
    assert_same_stream(captured.array.astype(np.float32), expected, layers=(1, 3))


def test_the_same_request_object_captures_the_same_again(roomy: EngineThread) -> None:
    request = make_request(make_prompt(33), capture=ALL_LAYERS)
    first, second = roomy.answer(request), roomy.answer(request)
    assert generated_ids(first) == generated_ids(second)
    np.testing.assert_array_equal(captured_stream(first), captured_stream(second))


def test_a_stop_string_ends_the_capture_where_the_answer_ends(roomy: EngineThread, reference: ReferenceModel) -> None:
    prompt = (*make_prompt(24, seed=5), 312)
    text = "".join(delta.text for delta in roomy.answer(make_request(prompt, max_tokens=40))[0])
    request = make_request(prompt, capture=ALL_LAYERS, max_tokens=40, stop=(text[20:24],))
    answer = roomy.answer(request)
    assert answer[0][-1].finish_reason == "stop"
    assert 0 < len(generated_ids(answer)) < 40
    assert_same_stream(captured_stream(answer), reference.read(sequence_read(request, answer)))


@pytest.mark.parametrize("layers", [(4,), (-1,), (2, 1), (1, 1), (0, 99)])
def test_layers_outside_the_model_repeated_or_out_of_order_are_refused(
    roomy: EngineThread, layers: tuple[int, ...]
) -> None:
    """Fault 7 of the peer: layers out of range were ignored, and lists sorted and deduplicated in silence."""
    with pytest.raises(RequestFault, match="layer"):
        roomy.answer(make_request(make_prompt(5), capture=layers))


def test_several_sequences_of_one_capturing_request_are_refused(roomy: EngineThread) -> None:
    """Fault 3 of the peer: with n > 1 nothing was captured or steered, in silence."""
    with pytest.raises(RequestFault, match="n = 1"):
        roomy.answer(make_request(make_prompt(5), capture=(1,), n=2, temperature=1.0))
