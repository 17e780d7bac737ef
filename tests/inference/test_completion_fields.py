"""Every field of POST /v1/completions: its type, its range, and the `code` and `param` of what is refused."""

import math
from typing import Any

import pytest

from tests.inference.conftest import Preparer

pytestmark = pytest.mark.django_db

NOT_BOOLS: tuple[Any, ...] = (0, 1, "true", [], {}, 1.0)
NOT_INTEGERS: tuple[Any, ...] = (True, False, 1.0, 1.5, "1", [], {}, [1], 10**30, -(10**30))
NOT_NUMBERS: tuple[Any, ...] = (True, False, "1", [], {}, [1.0], math.inf, -math.inf, math.nan, 10**400)
NOT_STRINGS: tuple[Any, ...] = (1, True, 1.5, [], {}, ["a"])
BOOLS = (
    "echo",
    "stream",
    "add_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_token_ids",
)
# name -> (values taken, values out of range)
INTEGERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "max_tokens": ((1, 500), (-1, 32_001, 0)),
    "n": ((1, 16), (0, 17, -1)),
    "best_of": ((1,), (0, 2, -1)),
    "top_k": ((-1, 1, 5, 10**9), (0, -2)),
    "seed": ((0, 1, 2**63 - 1), (-1, 2**63)),
    "logprobs": ((0, 100), (-1, 101)),
    "prompt_logprobs": ((-1, 0, 100), (-2, 101)),
    "min_tokens": ((0, 4), (-1, 5, 32_001)),
}
NUMBERS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "temperature": ((0, 0.0, 1, 2.5, 100), (-0.001, 100.001, -1)),
    "top_p": ((1, 0.001, 1.0), (0, 0.0, -0.1, 1.0001, 2)),
    "min_p": ((0, 1, 0.5), (-0.001, 1.001)),
    "presence_penalty": ((-2, 2, 0), (-2.001, 2.001)),
    "frequency_penalty": ((-2, 2, 0), (-2.001, 2.001)),
    "repetition_penalty": ((0.001, 2, 1), (0, -1, 2.001)),
}
TOKEN_ID_LISTS: dict[str, tuple[int, int]] = {
    "stop_token_ids": (0, 16),
    "allowed_token_ids": (1, 1024),
    "logprob_token_ids": (1, 128),
}
OPTIONAL = (*BOOLS, *INTEGERS, *NUMBERS, *TOKEN_ID_LISTS, "stop", "stream_options", "user", "logit_bias") + (
    "output_residual_stream",
    "apply_steering_vectors",
)


def _cases(table: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]], wrong_types: tuple[Any, ...], side: int) -> Any:
    cases = [(name, value) for name, sides in table.items() for value in sides[side]]
    return cases + [(name, value) for name in table for value in wrong_types] if side else cases


def _each(*values: Any) -> tuple[Any, ...]:
    return values


def _assert_refused(prepare: Preparer, param: str, **fields: Any) -> None:
    error = prepare.refused(**fields)
    assert (error.code, error.status, error.param) == ("invalid_request", 400, param)
    assert error.message.startswith(param)


@pytest.mark.parametrize(("name", "value"), _cases(INTEGERS, NOT_INTEGERS, 0) + _cases(NUMBERS, NOT_NUMBERS, 0))
def test_a_number_in_its_range_is_taken(prepare: Preparer, name: str, value: float) -> None:
    work = prepare(**{"max_tokens": 4, name: value})
    if name not in ("best_of",):
        assert getattr(work.sampling, name) == value
        assert type(getattr(work.sampling, name)) is (int if name in INTEGERS else float)


@pytest.mark.parametrize(("name", "value"), _cases(INTEGERS, NOT_INTEGERS, 1) + _cases(NUMBERS, NOT_NUMBERS, 1))
def test_a_number_of_another_type_or_out_of_range_is_refused(prepare: Preparer, name: str, value: Any) -> None:
    _assert_refused(prepare, name, **{"max_tokens": 4, name: value})


@pytest.mark.parametrize("name", BOOLS)
def test_a_bool_is_true_or_false_and_nothing_else(prepare: Preparer, name: str) -> None:
    for flag in (True, False):
        work = prepare(max_tokens=4, **{name: flag})
        if name != "add_special_tokens":
            assert getattr(work if name in ("echo", "stream", "return_token_ids") else work.sampling, name) is flag
    for value in NOT_BOOLS:
        _assert_refused(prepare, name, **{name: value})


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_the_same_as_leaving_a_field_out(prepare: Preparer, name: str) -> None:
    with_null = prepare(**{name: None})
    without = prepare()
    assert with_null.sampling == without.sampling
    assert (with_null.echo, with_null.stream, with_null.user) == (False, False, None)
    assert (with_null.capture_layers, with_null.steering, with_null.is_steered) == ((), (), False)


def test_the_defaults_are_those_of_the_contract(prepare: Preparer) -> None:
    work = prepare()
    sampling = work.sampling
    n_prompt = len(work.prompts[0])
    assert sampling.max_tokens == 512 - n_prompt
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.seed, sampling.stop, sampling.logprobs, sampling.prompt_logprobs) == (None, (), None, None)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.skip_special_tokens) == (0, False, True)
    assert (work.echo, work.stream, work.include_usage, work.return_token_ids) == (False, False, False, False)
    assert work.hold_tokens == 512
    assert work.model == "tiny"
    assert work.served_model_name == prepare.model.served_model_name
    assert work.request_id == "req_test"
    assert work.deadline - work.created == pytest.approx(540, abs=1.5)


@pytest.mark.parametrize("name", ["mdoel", "functions", "suffix", "prompt ", "Prompt", ""])
def test_an_unknown_field_is_refused_by_its_name(prepare: Preparer, name: str) -> None:
    error = prepare.refused(**{name: 1})
    assert (error.code, error.param) == ("invalid_request", name)


def test_an_unknown_field_comes_before_an_unknown_model_and_that_before_its_ids(prepare: Preparer) -> None:
    assert prepare.refused(model="nobody", mdoel=1).param == "mdoel"
    error = prepare.refused(model="nobody", prompt=[10**6])
    assert (error.code, error.status, error.param) == ("model_not_found", 400, "model")


@pytest.mark.parametrize("body", [{}, {"prompt": "a"}, {"model": None, "prompt": "a"}])
def test_a_model_is_required(prepare: Preparer, body: Any) -> None:
    with pytest.raises(Exception, match="model is required") as caught:
        prepare.body(body)
    assert getattr(caught.value, "param", None) == "model"


@pytest.mark.parametrize("value", NOT_STRINGS)
@pytest.mark.parametrize("name", ["model", "user"])
def test_a_string_is_a_string(prepare: Preparer, name: str, value: Any) -> None:
    _assert_refused(prepare, name, **{name: value})


def test_a_prompt_is_required(prepare: Preparer) -> None:
    _assert_refused(prepare, "prompt", prompt=None)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt.0"),
        (["a", ""], "prompt.1"),
        ([[1], []], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([1, "a"], "prompt.1"),
        (["a", ["b"]], "prompt.1"),
        ([[1], 2], "prompt.1"),
        ([1, [2]], "prompt.1"),
        ([[1], "a"], "prompt.1"),
        ([[[1]]], "prompt.0.0"),
        ([True], "prompt.0"),
        ([1, True], "prompt.1"),
        ([[1, False]], "prompt.0.1"),
        ([1.0], "prompt.0"),
        ([1, 2.0], "prompt.1"),
        ([-1], "prompt.0"),
        ([[1, -1]], "prompt.0.1"),
        ([None], "prompt.0"),
        (["a", None], "prompt.1"),
        ({"text": "a"}, "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ([{}], "prompt.0"),
        ([1, 10**6], "prompt.1"),
        ([[1], [2, 10**6]], "prompt.1.1"),
        ([640], "prompt.0"),
        ([10**30], "prompt.0"),
        ("a\0b", "prompt"),
        (["a", "b\0"], "prompt.1"),
        ("\ud800", "prompt"),
        (["ok", "\udfff!"], "prompt.1"),
        ([1] * 32_001, "prompt"),
        (["a"] * 32_001, "prompt"),
    ],
)
def test_a_malformed_prompt_is_refused_where_it_is_wrong(prepare: Preparer, prompt: Any, param: str) -> None:
    error = prepare.refused(prompt=prompt, max_tokens=1)
    expected = "context_length_exceeded" if prompt == [1] * 32_001 else "invalid_request"
    assert (error.code, error.param) == (expected, param)


def test_the_four_forms_of_a_prompt(prepare: Preparer) -> None:
    text = prepare(prompt="The sky", max_tokens=1)
    texts = prepare(prompt=["The sky", "is"], max_tokens=1)
    ids = prepare(prompt=list(text.prompts[0]), max_tokens=1)
    lists = prepare(prompt=[list(ids) for ids in texts.prompts], max_tokens=1)
    assert text.prompts == ids.prompts
    assert texts.prompts == lists.prompts
    assert texts.prompts[0] == text.prompts[0]
    assert (text.prompt_texts, texts.prompt_texts) == (("The sky",), ("The sky", "is"))
    assert (ids.prompt_texts, lists.prompt_texts) == ((None,), (None, None))
    assert texts.hold_tokens == sum(map(len, texts.prompts)) + 2


def test_the_last_id_of_the_vocabulary_is_taken(prepare: Preparer) -> None:
    last = prepare.model.vocab_size - 1
    assert prepare(prompt=[0, last], max_tokens=1).prompts == ((0, last),)
    assert prepare.refused(prompt=[0, last + 1], max_tokens=1).param == "prompt.1"


@pytest.mark.parametrize("name", TOKEN_ID_LISTS)
def test_token_id_lists_keep_their_lengths_types_and_vocabulary(prepare: Preparer, name: str) -> None:
    low, high = TOKEN_ID_LISTS[name]
    extra = {"logprobs": 1, "max_tokens": 1}
    last = prepare.model.vocab_size - 1
    for length in (low, high):
        work = prepare(**extra, **{name: [last] * length})
        assert getattr(work.sampling, name) == (last,) * length
    for value in (*([[]] if low else []), [1] * (high + 1), 5, "1", {}, True):
        _assert_refused(prepare, name, **extra, **{name: value})
    for item in (True, 1.0, "1", None, -1, last + 1, 10**30, [1]):
        _assert_refused(prepare, f"{name}.1", **extra, **{name: [0, item]})


def test_logprob_token_ids_need_logprobs(prepare: Preparer) -> None:
    _assert_refused(prepare, "logprob_token_ids", logprob_token_ids=[1])
    assert prepare(logprob_token_ids=[1, 2], logprobs=0).sampling.logprob_token_ids == (1, 2)


def test_logit_bias_is_a_map_of_canonical_token_ids(prepare: Preparer) -> None:
    last = prepare.model.vocab_size - 1
    work = prepare(logit_bias={"0": -100, str(last): 100, "5": 0.5})
    assert work.sampling.logit_bias == {0: -100.0, last: 100.0, 5: 0.5}
    assert prepare(logit_bias={}).sampling.logit_bias == {}
    assert len(prepare(logit_bias={str(key): 1 for key in range(300)}).sampling.logit_bias) == 300
    for value in _each([], 1, "1", True, {str(key): 1 for key in range(301)}):
        _assert_refused(prepare, "logit_bias", logit_bias=value)
    for key in ("05", "-1", "+1", " 1", "1 ", "1.0", "1e2", "a", "", "٣", "1_0", str(last + 1), "9" * 40):
        error = prepare.refused(logit_bias={key: 1})
        assert (error.code, error.param) == ("invalid_request", f"logit_bias.{key}")
    for bias in _each(True, "1", None, 100.001, -100.001, math.inf, math.nan, [1]):
        _assert_refused(prepare, "logit_bias.7", logit_bias={"7": bias})


def test_stop_is_a_string_or_one_to_four(prepare: Preparer) -> None:
    assert prepare(stop="\n").sampling.stop == ("\n",)
    assert prepare(stop=["a", "b", "c", "d"]).sampling.stop == ("a", "b", "c", "d")
    for value in _each("", [], ["a"] * 5, 1, True, {}):
        _assert_refused(prepare, "stop", stop=value)
    for value in _each("", 1, None, True, ["b"], "a\0", "\ud800"):
        _assert_refused(prepare, "stop.1", stop=["a", value])


def test_text_without_nul_or_lone_surrogate(prepare: Preparer) -> None:
    for value in _each("\0", "a\0", "\ud800", "a\udc00b"):
        for name in ("model", "user", "stop", "prompt"):
            _assert_refused(prepare, name, **{name: value})
    assert prepare(user="😀" * 256).user == "😀" * 256
    _assert_refused(prepare, "user", user="a" * 257)


def test_stream_options_need_a_stream(prepare: Preparer) -> None:
    assert prepare(stream=True, stream_options={"include_usage": True}).include_usage is True
    assert prepare(stream=True, stream_options={"include_usage": None}).include_usage is False
    assert prepare(stream=True, stream_options={}).include_usage is False
    for stream in (None, False):
        _assert_refused(prepare, "stream_options", stream=stream, stream_options={"include_usage": True})
    for value in _each([], 1, "a", True):
        _assert_refused(prepare, "stream_options", stream=True, stream_options=value)
    _assert_refused(prepare, "stream_options.include_usage", stream=True, stream_options={"include_usage": 1})
    _assert_refused(prepare, "stream_options.more", stream=True, stream_options={"more": True})


def test_prompt_logprobs_are_not_streamed(prepare: Preparer) -> None:
    _assert_refused(prepare, "prompt_logprobs", stream=True, prompt_logprobs=0)
    assert prepare(stream=False, prompt_logprobs=0).sampling.prompt_logprobs == 0


def test_echo_with_logprobs_asks_for_the_prompts_too(prepare: Preparer) -> None:
    assert prepare(echo=True, logprobs=3).sampling.prompt_logprobs == 3
    assert prepare(echo=True, logprobs=3, stream=True).sampling.prompt_logprobs == 3
    assert prepare(echo=True, logprobs=3, prompt_logprobs=1).sampling.prompt_logprobs == 1
    assert prepare(echo=True).sampling.prompt_logprobs is None
    assert prepare(logprobs=3).sampling.prompt_logprobs is None


def test_max_tokens_zero_scores_a_prompt_and_needs_echo(prepare: Preparer) -> None:
    work = prepare(max_tokens=0, echo=True, logprobs=1)
    assert work.sampling.max_tokens == 0
    assert work.hold_tokens == len(work.prompts[0])
    _assert_refused(prepare, "max_tokens", max_tokens=0)
    _assert_refused(prepare, "min_tokens", max_tokens=0, echo=True, min_tokens=1)


def test_best_of_may_only_repeat_n(prepare: Preparer) -> None:
    assert prepare(best_of=3, n=3, max_tokens=1).sampling.n == 3
    error = prepare.refused(best_of=2, n=1)
    assert (error.code, error.param) == ("invalid_request", "best_of")
    assert "vLLM" in error.message


def test_max_tokens_is_required_with_several_prompts_or_n(prepare: Preparer) -> None:
    _assert_refused(prepare, "max_tokens", n=2)
    _assert_refused(prepare, "max_tokens", prompt=["a", "b"])
    assert prepare(prompt=["a"]).sampling.max_tokens > 0


def test_the_work_bound(prepare: Preparer) -> None:
    assert prepare(prompt=["a"] * 20, n=16, max_tokens=100).hold_tokens == 40 + 32_000
    _assert_refused(prepare, "max_tokens", prompt=["a"] * 20, n=16, max_tokens=101)
    assert len(prepare(prompt=[[1]] * 32_000, max_tokens=0, echo=True).prompts) == 32_000
    _assert_refused(prepare, "max_tokens", prompt=[[1]] * 32_000, n=2, max_tokens=0, echo=True)


def test_min_tokens_is_bounded_by_what_fits_where_max_tokens_is_left_out(prepare: Preparer) -> None:
    room = prepare().sampling.max_tokens
    assert prepare(min_tokens=room).sampling.min_tokens == room
    _assert_refused(prepare, "min_tokens", min_tokens=room + 1)
