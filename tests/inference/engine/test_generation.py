"""Plain generation through our front: what vLLM itself gives, and every sampling field of a Completion."""

import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inference.engine.errors import RequestFault
from tests.inference.engine.architectures import run_apart
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import (
    VOCABULARY,
    generated_ids,
    generated_text,
    make_prompt,
    make_request,
)

if TYPE_CHECKING:
    from inference.wire import EngineDelta, PositionLogprobs

# Ends with whole characters: after half of one, vLLM's detokenizer gives the prompt back with the first token.
CLEAN_PROMPT = (*make_prompt(24, seed=5), 312)
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
PROMPTS = [make_prompt(3 + 2 * index, seed=100 + index) for index in range(50)]


def generate_with_vllm(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], str, list[Any]]]:
    """Give each prompt, alone, to vLLM's own `LLM.generate`; runs in a process of its own."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=64 * 1024**2)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    answers = []
    for prompt in prompts:
        output = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)[0]
        completion = output.outputs[0]
        logprobs = [
            [(token_id, entry.logprob, entry.rank, entry.decoded_token) for token_id, entry in position.items()]
            for position in (*output.prompt_logprobs[1:], *completion.logprobs)
        ]
        answers.append((tuple(completion.token_ids), completion.text, logprobs))
    return answers


def test_greedy_answers_are_exactly_those_of_vllm(roomy: EngineThread, tiny_float32: Path) -> None:
    (expected,) = run_apart([partial(generate_with_vllm, tiny_float32, PROMPTS)])
    assert not isinstance(expected, Exception), expected
    for prompt, (ids, text, logprobs) in zip(PROMPTS, expected, strict=True):
        answer = roomy.answer(make_request(prompt, max_tokens=16, logprobs=4, prompt_logprobs=2))
        assert generated_ids(answer) == ids
        assert generated_text(answer) == text
        positions = [*_prompt_logprobs(answer[0])[1:], *_logprobs(answer[0])]
        got = [[(one.token_id, one.logprob, one.rank, one.token) for one in position or ()] for position in positions]
        assert got == logprobs


def test_deltas_put_together_are_the_whole(roomy: EngineThread) -> None:
    deltas, captured = roomy.answer(make_request(make_prompt(12), max_tokens=30, logprobs=0))
    assert captured is None
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert sum(len(delta.token_ids) for delta in deltas) == 30
    for delta in deltas:
        assert delta.logprobs is not None
        assert [position[0].token_id for position in delta.logprobs] == list(delta.token_ids)


def test_a_repetition_penalty_too_small_for_float32_repeats(roomy: EngineThread) -> None:
    prompt = make_prompt(24)
    request = make_request(prompt, max_tokens=4, temperature=1.0, seed=3, repetition_penalty=1e-320, logprobs=1)
    assert set(generated_ids(roomy.answer(request))) <= set(prompt)


def test_the_whole_vocabulary_of_each_prompt_token(roomy: EngineThread, reference: ReferenceModel) -> None:
    prompt = make_prompt(9)
    deltas, _ = roomy.answer(make_request(prompt, max_tokens=0, prompt_logprobs=-1))
    logprobs = _prompt_logprobs(deltas)
    assert logprobs[0] is None
    expected = reference.read(prompt).logprobs
    for index, position in enumerate(logprobs[1:]):
        assert position is not None
        assert position[0].token_id == prompt[index + 1]
        assert len(position) == VOCABULARY
        got = np.full(VOCABULARY, np.nan)
        got[[one.token_id for one in position]] = [one.logprob for one in position]
        np.testing.assert_allclose(got, expected[index], atol=1e-4)
        assert position[0].rank == 1 + int((expected[index] > expected[index][prompt[index + 1]]).sum())


def test_several_sequences_come_with_their_indexes(roomy: EngineThread) -> None:
    deltas, _ = roomy.answer(make_request(make_prompt(10), n=4, temperature=1.0, max_tokens=12, seed=5))
    lengths = Counter[int]()
    for delta in deltas:
        lengths[delta.index] += len(delta.token_ids)
    assert lengths == dict.fromkeys(range(4), 12)
    assert len({_ids_of(deltas, index) for index in range(4)}) == 4


def test_greedy_sequences_of_one_prompt_are_the_same(roomy: EngineThread) -> None:
    deltas, _ = roomy.answer(make_request(make_prompt(10), n=3, max_tokens=5))
    assert len({_ids_of(deltas, index) for index in range(3)}) == 1


@pytest.mark.parametrize("engine_name", ["roomy", "cramped"])
def test_a_seed_repeats_whatever_else_runs(engine_name: str, request: pytest.FixtureRequest) -> None:
    """On the cramped engine the prompt comes in chunks, which vLLM's CPU build cannot do with a seed by itself."""
    engine: EngineThread = request.getfixturevalue(engine_name)
    seeded = [make_request(make_prompt(150, seed=i), temperature=1.0, seed=7 + i, max_tokens=20) for i in range(3)]
    alone = [generated_ids(engine.answer(one)) for one in seeded]
    others = [make_request(make_prompt(90, seed=50 + i), temperature=1.0, max_tokens=30) for i in range(6)]
    together = [generated_ids(answer) for answer in engine.answer_all([*seeded, *others])[:3]]
    assert together == alone
    assert len(set(alone)) == 3


def test_a_seed_gives_the_same_in_chunks_as_in_one_piece(roomy: EngineThread, cramped: EngineThread) -> None:
    request = make_request(make_prompt(200, seed=4), temperature=0.9, seed=11, max_tokens=20)
    assert generated_ids(roomy.answer(request)) == generated_ids(cramped.answer(request))


@pytest.mark.parametrize("temperature", [0.004, 0.7, 2.0, 40.0, 100.0])
def test_the_temperature_is_the_one_asked_for(
    roomy: EngineThread, reference: ReferenceModel, temperature: float
) -> None:
    """vLLM takes 0.01 to 2: outside that the worker sets it. The mean logprob says how hot it was."""
    prompt = make_prompt(20)
    request = make_request(prompt, temperature=temperature, n=16, max_tokens=24, logprobs=0, seed=1)
    expected_of_sampled, got = [], []
    deltas = roomy.answer(request)[0]
    for index in range(16):
        ids = _ids_of(deltas, index)
        logprobs = reference.read((*prompt, *ids)).logprobs[len(prompt) - 1 : -1].astype(np.float64)
        scaled = logprobs / temperature
        probabilities = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        expected_of_sampled.append((probabilities * logprobs).sum(axis=-1))
        got.append(logprobs[np.arange(len(ids)), list(ids)])
    assert abs(np.mean(got) - np.mean(expected_of_sampled)) < max(0.01, 0.12 * np.std(got))


def test_stop_strings_and_whether_they_are_kept(roomy: EngineThread) -> None:
    prompt = CLEAN_PROMPT
    text = generated_text(roomy.answer(make_request(prompt, max_tokens=40)))
    stop = text[20:24]
    ends_at = text.index(stop)
    deltas = roomy.answer(make_request(prompt, max_tokens=40, stop=("never there", stop)))[0]
    assert "".join(delta.text for delta in deltas) == text[:ends_at]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    kept = generated_text(
        roomy.answer(make_request(prompt, max_tokens=40, stop=(stop,), include_stop_str_in_output=True))
    )
    assert kept == text[: ends_at + len(stop)]


def test_stop_tokens_end_tokens_and_min_tokens(roomy: EngineThread) -> None:
    prompt = CLEAN_PROMPT
    ids = generated_ids(roomy.answer(make_request(prompt, max_tokens=20)))
    stop_id = ids[5]
    first = ids.index(stop_id)
    deltas = roomy.answer(make_request(prompt, max_tokens=20, stop_token_ids=(stop_id,)))[0]
    assert generated_ids((deltas, None)) == ids[: first + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop_id)
    longer = generated_ids(roomy.answer(make_request(prompt, max_tokens=20, stop_token_ids=(stop_id,), min_tokens=12)))
    assert len(longer) >= 12
    # The end token, made likely: it ends the answer unless it is to be ignored.
    bias = {1: 100.0}
    ended = roomy.answer(make_request(prompt, max_tokens=20, logit_bias=bias, ignore_eos=False))[0]
    assert (generated_ids((ended, None)), ended[-1].finish_reason, ended[-1].stop_reason) == ((1,), "stop", None)
    assert generated_text((ended, None)) == ""
    assert generated_ids(roomy.answer(make_request(prompt, max_tokens=3, logit_bias=bias))) == (1, 1, 1)
    shown = roomy.answer(make_request(prompt, max_tokens=2, logit_bias=bias, skip_special_tokens=False))
    assert generated_text(shown) == "</s></s>"


def test_allowed_tokens_and_penalties(roomy: EngineThread) -> None:
    prompt = CLEAN_PROMPT
    allowed = tuple(range(300, 320))
    answer = roomy.answer(make_request(prompt, max_tokens=30, temperature=1.0, allowed_token_ids=allowed))
    assert set(generated_ids(answer)) <= set(allowed)
    plain = generated_ids(roomy.answer(make_request(prompt, max_tokens=60)))
    penalties: list[dict[str, Any]] = [{name: 2.0} for name in PENALTIES]
    for penalty in penalties:
        answer = roomy.answer(make_request(prompt, max_tokens=60, **penalty))
        assert len(set(generated_ids(answer))) > len(set(plain))


def test_top_k_top_p_and_min_p_narrow_the_choice(roomy: EngineThread, reference: ReferenceModel) -> None:
    prompt = CLEAN_PROMPT
    greedy = generated_ids(roomy.answer(make_request(prompt, max_tokens=10)))
    narrowings: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    for narrow in narrowings:
        assert generated_ids(roomy.answer(make_request(prompt, max_tokens=10, temperature=1.5, **narrow))) == greedy
    wide = make_request(prompt, max_tokens=40, temperature=2.0, top_k=5, seed=3)
    ids = generated_ids(roomy.answer(wide))
    logprobs = reference.read((*prompt, *ids)).logprobs[len(prompt) - 1 : -1]
    ranks = (logprobs > logprobs[np.arange(40), list(ids)][:, None]).sum(axis=-1)
    assert ranks.max() <= 4
    assert ranks.max() > 0


def test_logprobs_of_tokens_of_ones_choice(roomy: EngineThread, reference: ReferenceModel) -> None:
    """Beside the likeliest, without touching another request of the batch."""
    prompt = make_prompt(30, seed=8)
    asked = (17, 200, 5, 639)
    mine = make_request(prompt, max_tokens=10, logprobs=2, logprob_token_ids=asked)
    others = [
        make_request(prompt, max_tokens=10, logprobs=5),
        make_request(prompt, max_tokens=10),
        make_request(prompt, max_tokens=10, logprobs=0, logprob_token_ids=(9,), temperature=1.0, seed=2),
    ]
    answers = roomy.answer_all([mine, *others])
    for request, answer, top in ((mine, answers[0], 2), (others[0], answers[1], 5), (others[2], answers[3], 0)):
        assert not isinstance(answer, BaseException)
        ids = generated_ids(answer)
        expected = reference.read((*prompt, *ids)).logprobs[len(prompt) - 1 : -1]
        for position, row, token_id in zip(_logprobs(answer[0]), expected, ids, strict=True):
            order = [int(one) for one in np.argsort(-row)]
            wanted = [token_id, *order[:top], *request.sampling.logprob_token_ids]
            assert [one.token_id for one in position] == list(dict.fromkeys(wanted))
            for one in position:
                assert math.isclose(one.logprob, row[one.token_id], abs_tol=1e-4)
                assert one.rank in {order.index(one.token_id) + 1, 0}
            assert all(one.rank for one in position if one.token_id in {*order[:top]})


def test_what_vllm_refuses_is_a_fault_of_the_request(roomy: EngineThread) -> None:
    cases = {
        "vocabulary": make_request((0, VOCABULARY)),
        "empty": make_request(()),
        "context": make_request(make_prompt(500), max_tokens=13),
        "logit_bias": make_request((0, 5), logit_bias={VOCABULARY: 1.0}),
        "logprob": make_request((0, 5), logprobs=VOCABULARY + 1),
    }
    for sentence, request in cases.items():
        with pytest.raises(RequestFault, match=sentence):
            roomy.answer(request)
    assert len(generated_ids(roomy.answer(make_request(make_prompt(500), max_tokens=12)))) == 12
    assert roomy.engine.num_unfinished == 0


def _ids_of(deltas: "list[EngineDelta]", index: int) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas if delta.index == index))


def _logprobs(deltas: "list[EngineDelta]") -> "list[PositionLogprobs]":
    return list(itertools.chain.from_iterable(delta.logprobs or () for delta in deltas))


def _prompt_logprobs(deltas: "list[EngineDelta]") -> "list[PositionLogprobs | None]":
    with_them = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(with_them) == 1
    assert deltas[0].prompt_logprobs is with_them[0]
    return list(with_them[0])
