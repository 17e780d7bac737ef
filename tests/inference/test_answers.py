import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.answers import AnswerBuilder, MisbehavedEngine, StreamShaper, engine_requests
from inference.wire import CompletionWork, EngineDelta, PositionLogprobs, Sampling, TokenLogprob


def spell(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def work(*prompts: tuple[int, ...], texts: tuple[str | None, ...] = (), **fields: Any) -> CompletionWork:
    sampling = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
    prompts = prompts or ((1, 2),)
    return CompletionWork(
        request_id="req_abc",
        model="tiny",
        served_model_name="the-checkpoint",
        created=1234,
        deadline=9e9,
        prompts=prompts,
        prompt_texts=texts or (None,) * len(prompts),
        sampling=Sampling(**{"max_tokens": 4, **sampling}),
        hold_tokens=0,
        **fields,
    )


def at(token_id: int, logprob: float = -0.5, *others: int) -> PositionLogprobs:
    standing = TokenLogprob(token_id, logprob, 2, spell([token_id]))
    return (standing, *(TokenLogprob(other, -1.0 - i, i + 1, spell([other])) for i, other in enumerate(others)))


def whole(of: CompletionWork, *gains: tuple[int, EngineDelta], activations: bytes | None = None) -> Any:
    builder = AnswerBuilder(of, spell)
    for prompt, delta in gains:
        builder.add(prompt, delta)
    return json.loads(builder.body(activations), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def end(index: int = 0, **fields: Any) -> EngineDelta:
    return EngineDelta(index=index, finish_reason="length", **fields)


def test_choices_stand_by_prompt_and_then_by_n() -> None:
    of = work((1,), (2,), n=2)
    gains = [(p, end(i, text=f"p{p}n{i}", token_ids=(p, i))) for p, i in ((1, 1), (0, 1), (1, 0), (0, 0))]
    answer = whole(of, *gains)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "p0n0"),
        (1, "p0n1"),
        (2, "p1n0"),
        (3, "p1n1"),
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert (answer["id"], answer["object"], answer["created"]) == ("cmpl-abc", "text_completion", 1234)
    assert answer["model"] == "the-checkpoint"


def test_deltas_of_a_sequence_add_up() -> None:
    answer = whole(
        work(logprobs=1),
        (0, EngineDelta(index=0, text="", token_ids=(5,), logprobs=(at(5),))),
        (0, EngineDelta(index=0, text="ab", token_ids=(6,), logprobs=(at(6),))),
        (0, EngineDelta(index=0, text="c", token_ids=(7,), logprobs=(at(7),), finish_reason="stop", stop_reason="x")),
    )
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "x")
    assert choice["logprobs"]["tokens"] == ["<5>", "<6>", "<7>"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 6]
    assert choice["token_ids"] is None
    assert choice["prompt_logprobs"] is None


@pytest.mark.parametrize(("asked", "top"), [(0, ["<5>"]), (1, ["<5>", "<8>"]), (2, ["<5>", "<8>", "<9>"])])
def test_top_logprobs_hold_the_token_itself_and_as_many_more_as_asked(asked: int, top: list[str]) -> None:
    answer = whole(work(logprobs=asked), (0, end(token_ids=(5,), logprobs=(at(5, -3.0, 8, 9),))))
    assert list(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == top


def test_logprob_token_ids_are_all_among_the_top() -> None:
    answer = whole(work(logprobs=0, logprob_token_ids=(8, 9)), (0, end(token_ids=(5,), logprobs=(at(5, -3.0, 8, 9),))))
    assert list(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == ["<5>", "<8>", "<9>"]


def test_a_probability_of_zero_is_a_large_negative_number() -> None:
    answer = whole(
        work(logprobs=0, prompt_logprobs=0),
        (0, end(token_ids=(5,), logprobs=(at(5, -math.inf),), prompt_logprobs=(None, at(2, -math.inf)))),
    )
    (choice,) = answer["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["prompt_logprobs"] == [None, {"2": {"logprob": -9999.0, "rank": 2, "decoded_token": "<2>"}}]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["logprobs", "prompt_logprobs"])
def test_what_is_no_number_never_reaches_an_answer(value: float, where: str) -> None:
    given: dict[str, Any] = {"logprobs": (at(5),), "prompt_logprobs": (None, at(2))}
    given[where] = (None, at(2, value)) if where == "prompt_logprobs" else (at(5, value),)
    with pytest.raises(MisbehavedEngine):
        whole(work(logprobs=0, prompt_logprobs=0), (0, end(token_ids=(5,), **given)))


@pytest.mark.parametrize(
    "logprobs",
    [(), (at(5), at(6)), (at(6),)],
    ids=["missing", "too many", "of another token"],
)
def test_logprobs_that_do_not_fit_the_tokens_are_refused(logprobs: tuple[PositionLogprobs, ...]) -> None:
    with pytest.raises(MisbehavedEngine):
        whole(work(logprobs=0), (0, end(token_ids=(5,), logprobs=logprobs)))


def test_a_sequence_that_never_ended_is_refused() -> None:
    with pytest.raises(MisbehavedEngine):
        whole(work(), (0, EngineDelta(index=0, text="a", token_ids=(5,))))


def test_prompt_logprobs_that_are_cut_short_are_refused() -> None:
    with pytest.raises(MisbehavedEngine):
        whole(work((1, 2, 3), prompt_logprobs=0), (0, end(token_ids=(5,), prompt_logprobs=(None, at(2)))))


def test_echo_puts_the_prompt_before_the_text_and_its_logprobs_before_the_others() -> None:
    of = work((1, 2), texts=("Hey",), echo=True, logprobs=0, prompt_logprobs=0)
    answer = whole(of, (0, end(text="you", token_ids=(5,), logprobs=(at(5),), prompt_logprobs=(None, at(2, -0.25)))))
    (choice,) = answer["choices"]
    assert choice["text"] == "Heyyou"
    assert choice["logprobs"] == {
        "tokens": ["<1>", "<2>", "<5>"],
        "token_logprobs": [None, -0.25, -0.5],
        "top_logprobs": [None, {"<2>": -0.25}, {"<5>": -0.5}],
        "text_offset": [0, 3, 6],
    }


def test_echo_spells_a_prompt_that_was_given_in_ids() -> None:
    assert whole(work((1, 2), echo=True), (0, end(text="!", token_ids=(5,))))["choices"][0]["text"] == "<1><2>!"


def test_echo_without_generation_scores_the_prompt_alone() -> None:
    of = work((1, 2), echo=True, max_tokens=0, logprobs=0, prompt_logprobs=0)
    answer = whole(of, (0, end(prompt_logprobs=(None, at(2)))))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<1><2>", "length")
    assert choice["logprobs"]["tokens"] == ["<1>", "<2>"]
    assert answer["usage"]["completion_tokens"] == 0


def test_with_token_ids_an_echoed_prompt_comes_as_ids_as_in_vllm() -> None:
    of = work((1, 2), texts=("Hey",), echo=True, return_token_ids=True)
    (choice,) = whole(of, (0, end(text="you", token_ids=(5,))))["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("you", [1, 2], [5])


def test_activations_stand_beside_the_choices() -> None:
    answer = whole(work(), (0, end(text="a", token_ids=(5,))), activations=b'{"residual_stream":{"shape":[1]}}')
    assert answer["activations"] == {"residual_stream": {"shape": [1]}}
    assert answer["choices"][0]["text"] == "a"


def test_the_engine_gets_one_request_for_each_prompt() -> None:
    requests = engine_requests(work((1,), (2, 3), n=3, seed=7))
    assert [request.request_id for request in requests] == ["req_abc-0", "req_abc-1"]
    assert [request.prompt_token_ids for request in requests] == [(1,), (2, 3)]
    assert all(request.sampling.n == 3 and request.sampling.seed == 7 for request in requests)


def chunks(of: CompletionWork, *gains: tuple[int, EngineDelta]) -> list[Any]:
    shaper = StreamShaper(of, spell)
    made = [shaper.chunk(prompt, delta) for prompt, delta in gains]
    return [json.loads(chunk) for chunk in [*made, shaper.usage_chunk()] if chunk is not None]


def test_a_stream_says_its_usage_in_a_last_chunk_without_choices() -> None:
    *_, last = chunks(work((1, 2), (3,)), (0, end(token_ids=(5,))), (1, end(token_ids=(6,))))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_stream_sends_nothing_before_there_is_something() -> None:
    first, *_ = chunks(work(), (0, EngineDelta(index=0)), (0, EngineDelta(index=0, text="a", token_ids=(5,))))
    assert first["choices"][0]["text"] == "a"
    assert "usage" not in first


sequences = st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=5)


@given(data=st.data(), echo=st.booleans(), n=st.integers(1, 3), return_token_ids=st.booleans())
def test_the_chunks_of_a_stream_add_up_to_the_whole_answer(
    data: st.DataObject, echo: bool, n: int, return_token_ids: bool
) -> None:
    of = work(
        (1, 2),
        (3,),
        texts=("é", None),
        n=n,
        logprobs=1,
        prompt_logprobs=1,
        echo=echo,
        return_token_ids=return_token_ids,
    )
    gains: list[tuple[int, EngineDelta]] = []
    for prompt, ids in enumerate(of.prompts):
        prompt_logprobs: Any = (None, *(at(token_id) for token_id in ids[1:]))
        for index in range(n):
            steps = data.draw(sequences)
            for step, (text, token_ids) in enumerate(steps):
                delta = EngineDelta(
                    index=index,
                    text=text,
                    token_ids=tuple(token_ids),
                    logprobs=tuple(at(token_id, -0.5, 4) for token_id in token_ids),
                    prompt_logprobs=prompt_logprobs,
                    finish_reason="stop" if step == len(steps) - 1 else None,
                )
                prompt_logprobs = None
                gains.append((prompt, delta))
    answer = whole(of, *gains)
    *streamed, last = chunks(of, *gains)
    assert last["usage"] == answer["usage"]
    for choice in answer["choices"]:
        own = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in own for value in part["logprobs"][name]] == choice["logprobs"][name]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if return_token_ids:
            assert [token_id for part in own for token_id in part["token_ids"]] == choice["token_ids"]


def test_the_answers_json_is_what_msgspec_reads_back() -> None:
    builder = AnswerBuilder(work(), spell)
    builder.add(0, end(text='"\\\u2028 é', token_ids=(5,)))
    assert msgspec.json.decode(builder.body())["choices"][0]["text"] == '"\\\u2028 é'
