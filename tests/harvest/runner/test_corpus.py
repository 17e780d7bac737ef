"""Token ids as the model reads them: the tokenizer's own, cut at the context."""

import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harvest.models import HarvestCorpus
from harvest.runner import corpus
from harvest.runner.corpus import load_prompts, load_tokenizer, tokenise

TEXTS = ["Hello", "The capital of France is Paris.", "日本語 👩‍🚀 Łódź", "a" * 3_000, " ", "\n\n\t"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(zstandard.compress((tiny_model / "tokenizer.json").read_bytes()))


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_the_tokenizers_own(tokenizer: Tokenizer, add_special_tokens: bool) -> None:
    made = tokenise(TEXTS, tokenizer=tokenizer, add_special_tokens=add_special_tokens, tokens_at_most=10_000)
    for index, text in enumerate(TEXTS):
        expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        assert made[index].index == index
        assert made[index].token_ids.tolist() == expected
        assert not made[index].is_cut
    bos = tokenizer.token_to_id("<s>")
    assert all((prompt.token_ids[0] == bos) == add_special_tokens for prompt in made)


@pytest.mark.parametrize("tokens_at_most", [1, 2, 7, 511])
def test_a_long_prompt_keeps_its_first_tokens(tokenizer: Tokenizer, tokens_at_most: int) -> None:
    made = tokenise(TEXTS, tokenizer=tokenizer, add_special_tokens=True, tokens_at_most=tokens_at_most)
    for prompt, text in zip(made, TEXTS, strict=True):
        expected = tokenizer.encode(text).ids
        assert prompt.token_ids.tolist() == expected[:tokens_at_most]
        assert prompt.is_cut == (len(expected) > tokens_at_most)


def test_a_very_long_prompt_is_read_by_its_beginning(tokenizer: Tokenizer) -> None:
    long = "Rain fell on the harbour all morning; 日本. " * 20_000
    assert len(long) > corpus.BLOCK_CHARACTERS
    made = tokenise(["a", long, "b"], tokenizer=tokenizer, add_special_tokens=True, tokens_at_most=511)
    assert [prompt.index for prompt in made] == [0, 1, 2]
    assert made[1].token_ids.tolist() == tokenizer.encode(long).ids[:511]
    assert made[1].is_cut
    assert made[2].token_ids.tolist() == tokenizer.encode("b").ids


def test_a_very_long_prompt_that_fits_is_whole(tokenizer: Tokenizer) -> None:
    long = "one two three " * 20_000
    (made,) = tokenise([long], tokenizer=tokenizer, add_special_tokens=False, tokens_at_most=1_000_000)
    assert made.token_ids.tolist() == tokenizer.encode(long, add_special_tokens=False).ids
    assert not made.is_cut


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), min_size=1, max_size=12))
def test_tokens_never_outnumber_what_was_reserved(tokenizer: Tokenizer, prompts: list[str]) -> None:
    made = tokenise(prompts, tokenizer=tokenizer, add_special_tokens=True, tokens_at_most=511)
    assert sum(len(prompt.token_ids) for prompt in made) <= sum(len(text.encode()) + 1 for text in prompts)


def test_prompts_are_kept_as_they_were() -> None:
    stored = zstandard.compress(json.dumps(TEXTS, ensure_ascii=False).encode())
    assert load_prompts(HarvestCorpus(prompts_zstd=stored)) == TEXTS


def test_a_tokenizer_that_cuts_and_pads_by_itself_is_told_not_to(tiny_model: Path) -> None:
    saved = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    saved.enable_truncation(max_length=4)
    saved.enable_padding(length=16)
    tokenizer = load_tokenizer(zstandard.compress(saved.to_str().encode()))
    (made,) = tokenise([TEXTS[1]], tokenizer=tokenizer, add_special_tokens=True, tokens_at_most=511)
    assert made.token_ids.tolist() == Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(TEXTS[1]).ids


def test_a_tokenizer_is_made_once_and_keeps_nothing_of_a_job(tiny_model: Path) -> None:
    saved = zstandard.compress((tiny_model / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(saved)
    (cut,) = tokenise([TEXTS[1]], tokenizer=tokenizer, add_special_tokens=False, tokens_at_most=2)
    assert len(cut.token_ids) == 2
    again = load_tokenizer(bytes(bytearray(saved)))
    assert again is tokenizer
    (whole,) = tokenise([TEXTS[1]], tokenizer=again, add_special_tokens=True, tokens_at_most=511)
    assert whole.token_ids.tolist() == tokenizer.encode(TEXTS[1]).ids
    assert not whole.is_cut
