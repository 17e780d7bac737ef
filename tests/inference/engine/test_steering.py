"""Steered residual streams against HuggingFace's with hooks: each kind of steering vector, everywhere it may act."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from inference.engine.errors import RequestFault
from inference.wire import EngineDelta, EngineRequest, PositionLogprobs, SteeringVector
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    assert_same_stream,
    captured_stream,
    generated_ids,
    generated_text,
    make_prompt,
    make_request,
    make_values,
    make_vector,
    sequence_read,
    spell_out,
)

if TYPE_CHECKING:
    from tests.inference.engine.requests import Answer

PROMPT = make_prompt(70, seed=3)
GENERATED = 20

EVERYWHERE = make_vector(make_values(1, HIDDEN), (1,))
SCALED_DOWN = make_vector(make_values(2, HIDDEN, seed=1), (3, 0), scale=-0.37)
SPANS = make_vector(make_values(1, HIDDEN, seed=2), (2,), position_spans=((60, 75), (0, 3), (30, 31)))
ACROSS_CHUNKS = make_vector(make_values(1, HIDDEN, seed=3), (1,), position_spans=((31, 33), (63, 65)))
PROMPT_POSITIONS = make_vector(make_values(1, 3, HIDDEN, seed=4), (1,), position_indices=(40, 0, 7))
GENERATED_POSITIONS = make_vector(make_values(2, 4, HIDDEN, seed=5), (0, 2), position_indices=(88, 69, 70, 75))
NORM_MATCHED = make_vector(make_values(1, HIDDEN, seed=6) * 100, (2,), norm_match=True, scale=0.8)
NORM_MATCHED_POSITIONS = make_vector(
    make_values(1, 2, HIDDEN, seed=7), (3,), norm_match=True, position_indices=(72, 5), scale=2.0
)
KINDS: dict[str, tuple[SteeringVector, ...]] = {
    "everywhere": (EVERYWHERE,),
    "two layers, scaled": (SCALED_DOWN,),
    "spans": (SPANS,),
    "spans across chunks": (ACROSS_CHUNKS,),
    "positions of the prompt": (PROMPT_POSITIONS,),
    "generated positions": (GENERATED_POSITIONS,),
    "norm-matched": (NORM_MATCHED,),
    "norm-matched positions": (NORM_MATCHED_POSITIONS,),
    "several at one layer": (EVERYWHERE, ACROSS_CHUNKS, PROMPT_POSITIONS),
    "norm-matched after another at its layer": (make_vector(make_values(1, HIDDEN, seed=8) * 5, (2,)), NORM_MATCHED),
    "all at once": (EVERYWHERE, SCALED_DOWN, SPANS, GENERATED_POSITIONS, NORM_MATCHED, NORM_MATCHED_POSITIONS),
}


def assert_steered_right(reference: ReferenceModel, request: EngineRequest, answer: "Answer | BaseException") -> None:
    sequence = sequence_read(request, answer)
    meant = [spell_out(vector, len(sequence)) for vector in request.steering]
    expected = reference.read(sequence, meant)
    assert_same_stream(captured_stream(answer), expected)
    # The reference is not the unsteered stream: the vectors change something.
    assert np.abs(expected.stream - reference.read(sequence).stream).max() > 0.01
    # What was generated follows from the steered stream: greedy, position by position.
    predicted = expected.logprobs[len(request.prompt_token_ids) - 1 :].argmax(axis=-1)
    assert tuple(predicted) == generated_ids(answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine_name", ["roomy", "cramped"])
def test_each_kind_of_vector(
    engine_name: str, kind: str, request: pytest.FixtureRequest, reference: ReferenceModel
) -> None:
    """Fault 4 of the peer: position-wise vectors hit again at each decode step and chunk, and no generated token."""
    engine: EngineThread = request.getfixturevalue(engine_name)
    one = make_request(PROMPT, capture=ALL_LAYERS, steering=KINDS[kind], max_tokens=GENERATED)
    assert_steered_right(reference, one, engine.answer(one))


def test_preempted_requests_stay_steered(cramped: EngineThread, reference: ReferenceModel) -> None:
    before = cramped.describe_workers()[0]["preemptions"]
    kinds = list(KINDS.values())
    requests = [
        make_request(make_prompt(100, seed=20 + index), capture=ALL_LAYERS, steering=kinds[index], max_tokens=140)
        for index in range(8)
    ]
    answers = cramped.answer_all(requests)
    assert cramped.describe_workers()[0]["preemptions"] - before >= 3
    for one, answer in zip(requests, answers, strict=True):
        assert_steered_right(reference, one, answer)


def test_steered_and_plain_requests_share_a_batch(roomy: EngineThread, reference: ReferenceModel) -> None:
    kinds = list(KINDS.values())
    requests = [
        make_request(
            make_prompt(89, seed=index),
            capture=ALL_LAYERS if index % 3 else (),
            steering=kinds[index % len(kinds)] if index % 2 else (),
        )
        for index in range(30)
    ]
    alone = [generated_ids(roomy.answer(one)) for one in requests]
    for one, answer, ids in zip(requests, roomy.answer_all(requests), alone, strict=True):
        assert generated_ids(answer) == ids
        if one.capture_layers and one.steering:
            assert_steered_right(reference, one, answer)
        elif one.capture_layers:
            assert_same_stream(captured_stream(answer), reference.read(sequence_read(one, answer)))


def test_a_steered_request_leaves_nothing_in_the_prefix_cache(roomy: EngineThread) -> None:
    """Fault 1 of the peer: a plain request after a steered one with the same prompt changed."""
    prompt = make_prompt(200, seed=30)
    plain = make_request(prompt, max_tokens=24)
    steered = make_request(prompt, steering=[make_vector(make_values(1, HIDDEN) * 3, (0,))], max_tokens=24)
    steered_first = generated_ids(roomy.answer(steered))
    expected = generated_ids(roomy.answer(plain))
    assert steered_first != expected
    # And with the plain request's prefix in the cache, the steered one is as it was.
    assert generated_ids(roomy.answer(steered)) == steered_first
    assert generated_ids(roomy.answer(plain)) == expected


def test_the_capture_holds_the_steered_stream_at_the_steered_layer(roomy: EngineThread) -> None:
    values = make_values(1, HIDDEN)
    plain = captured_stream(roomy.answer(make_request(PROMPT, capture=(2,), max_tokens=1)))
    steered = captured_stream(
        roomy.answer(make_request(PROMPT, capture=(2,), steering=[make_vector(values, (2,))], max_tokens=1))
    )
    np.testing.assert_allclose(steered - plain, np.broadcast_to(values, plain.shape), atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_norm_match_is_blind_to_the_length_of_the_vector(roomy: EngineThread, size: float) -> None:
    plain = captured_stream(roomy.answer(make_request(PROMPT, capture=(2,), max_tokens=1)))
    vector = make_vector((make_values(1, HIDDEN) * np.float32(size)).astype(np.float32), (2,), norm_match=True)
    steered = captured_stream(roomy.answer(make_request(PROMPT, capture=(2,), steering=[vector], max_tokens=1)))
    added = np.linalg.norm(steered - plain, axis=-1)
    np.testing.assert_allclose(added, np.linalg.norm(plain, axis=-1), rtol=1e-4)


def test_scale_zero_gives_exactly_the_unsteered_answer(roomy: EngineThread) -> None:
    # A prompt of its own: a steered request reads no cached prefix, and with one the last bits may be others.
    prompt = make_prompt(70, seed=33)
    plain = make_request(prompt, max_tokens=GENERATED, logprobs=3)
    zero = make_request(
        prompt, max_tokens=GENERATED, logprobs=3, steering=[make_vector(make_values(1, HIDDEN), (1,), scale=0.0)]
    )
    assert all_logprobs(roomy.answer(plain)[0]) == all_logprobs(roomy.answer(zero)[0])


def all_logprobs(deltas: list[EngineDelta]) -> list[PositionLogprobs]:
    """Those of each token, however many of them came with one delta: a busy reader finds some together."""
    return [position for delta in deltas for position in delta.logprobs or ()]


def test_the_same_request_object_is_steered_again(roomy: EngineThread) -> None:
    """Fault 8 of the peer: vectors were popped from the caller's parameters, so that a reuse ran unsteered."""
    request = make_request(PROMPT, steering=[EVERYWHERE], max_tokens=GENERATED)
    plain = generated_text(roomy.answer(make_request(PROMPT, max_tokens=GENERATED)))
    texts = {generated_text(roomy.answer(request)) for _ in range(3)}
    assert len(texts) == 1
    assert texts != {plain}


@pytest.mark.parametrize(
    ("dtype", "to_bytes", "exact"),
    [
        ("bfloat16", lambda values: (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(), False),
        ("float16", lambda values: values.astype(np.float16).tobytes(), False),
        ("float32", lambda values: values.tobytes(), True),
    ],
)
def test_every_dtype_of_vector_is_read(
    roomy: EngineThread, dtype: str, to_bytes: Callable[[np.ndarray], bytes], exact: bool
) -> None:
    values = make_values(1, HIDDEN)
    vector = SteeringVector(data=to_bytes(values), dtype=dtype, shape=(1, HIDDEN), layer_indices=(2,))  # type: ignore[arg-type]
    plain = captured_stream(roomy.answer(make_request(PROMPT, capture=(2,), max_tokens=1)))
    steered = captured_stream(roomy.answer(make_request(PROMPT, capture=(2,), steering=[vector], max_tokens=1)))
    np.testing.assert_allclose(
        steered - plain, np.broadcast_to(values, plain.shape), atol=1e-5 if exact else 0.03, rtol=0
    )


GOOD = {"data": bytes(4 * HIDDEN), "dtype": "float32", "shape": (1, HIDDEN), "layer_indices": (1,)}
BAD_VECTORS: dict[str, tuple[dict[str, object], str]] = {
    "layer past the last": ({"layer_indices": (4,)}, "layers"),
    "negative layer": ({"layer_indices": (-1,)}, "layers"),
    "layer twice": ({"layer_indices": (1, 1), "shape": (2, HIDDEN), "data": bytes(8 * HIDDEN)}, "layers"),
    "wrong hidden size": ({"shape": (1, 32), "data": bytes(128)}, "shape"),
    "shape of another rank": ({"shape": (HIDDEN,)}, "shape"),
    "too few bytes": ({"data": bytes(4 * HIDDEN - 1)}, "bytes"),
    "too many bytes": ({"data": bytes(4 * HIDDEN + 4)}, "bytes"),
    "infinite value": ({"data": np.full((1, HIDDEN), np.inf, np.float32).tobytes()}, "finite"),
    "NaN": ({"data": np.full((1, HIDDEN), np.nan, np.float32).tobytes()}, "finite"),
    "infinite scale": ({"scale": float("inf")}, "scale"),
    "huge scale": ({"scale": 1.1e6}, "scale"),
    "zero with norm_match": ({"norm_match": True}, "norm_match"),
    "position past the last": ({"shape": (1, 1, HIDDEN), "position_indices": (77,)}, "position"),
    "negative position": ({"shape": (1, 1, HIDDEN), "position_indices": (-1,)}, "position"),
    "position twice": ({"shape": (1, 2, HIDDEN), "data": bytes(8 * HIDDEN), "position_indices": (3, 3)}, "positions"),
    "3-D without positions": ({"shape": (1, 1, HIDDEN)}, "shape"),
    "2-D with positions": ({"position_indices": (0,)}, "shape"),
    "empty span": ({"position_spans": ((4, 4),)}, "span"),
    "negative span": ({"position_spans": ((-1, 4),)}, "span"),
    "overlapping spans": ({"position_spans": ((3, 6), (0, 4))}, "overlap"),
    "spans and positions": (
        {"shape": (1, 1, HIDDEN), "position_indices": (0,), "position_spans": ((0, 1),)},
        "position_spans",
    ),
}


@pytest.mark.parametrize("name", BAD_VECTORS)
def test_a_vector_that_does_not_fit_is_refused(roomy: EngineThread, name: str) -> None:
    fields, sentence = BAD_VECTORS[name]
    vector = SteeringVector(**(GOOD | fields))  # type: ignore[arg-type]
    with pytest.raises(RequestFault, match=sentence):
        roomy.answer(make_request(PROMPT, steering=[vector]))


def test_a_vector_that_overflows_the_stream_is_a_fault_of_its_request(roomy: EngineThread) -> None:
    vector = make_vector(np.full((1, HIDDEN), 3e38, np.float32), (1,), scale=1e6)
    bad, good = make_request(PROMPT, steering=[vector]), make_request(PROMPT)
    expected = generated_ids(roomy.answer(good))
    answers = roomy.answer_all([bad, good])
    assert isinstance(answers[0], RequestFault)
    assert "finite" in str(answers[0])
    assert generated_ids(answers[1]) == expected
