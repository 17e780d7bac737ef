"""Tokenising: the ids of the checkpoint's own tokenizer, whatever the text, and soon refused where it can't fit."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference.tokenization import INLINE_CHARACTERS, ModelTokenizer, TextTooLong, load_tokenizer

LIMIT = 100_000


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def saved(tiny_model: Path) -> bytes:
    return (tiny_model / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def tokenizer(saved: bytes) -> ModelTokenizer:
    return load_tokenizer(zstandard.ZstdCompressor().compress(saved))


def _changed(saved: bytes, **changes: Any) -> ModelTokenizer:
    return ModelTokenizer(Tokenizer.from_str(json.dumps(json.loads(saved) | changes)))


def _encode(
    runner: asyncio.Runner, tokenizer: ModelTokenizer, texts: list[str], *, add: bool = True, limit: int = LIMIT
) -> tuple[tuple[int, ...], ...]:
    return runner.run(tokenizer.encode(texts, add_special_tokens=add, limit=limit))


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_any_unicode_text_comes_back_from_its_tokens(
    runner: asyncio.Runner, tokenizer: ModelTokenizer, saved: bytes, texts: list[str]
) -> None:
    reference = Tokenizer.from_buffer(saved)
    plain = _encode(runner, tokenizer, texts, add=False)
    for text, ids in zip(texts, plain, strict=True):
        assert list(ids) == reference.encode(text, add_special_tokens=False).ids
        if "<s>" not in text and "</s>" not in text:
            assert reference.decode(list(ids), skip_special_tokens=False) == text
    start = reference.token_to_id("<s>")
    assert _encode(runner, tokenizer, texts) == tuple((start, *ids) for ids in plain)


def test_long_and_many_texts_give_the_ids_that_short_ones_give(
    runner: asyncio.Runner, tokenizer: ModelTokenizer, saved: bytes
) -> None:
    reference = Tokenizer.from_buffer(saved)
    long = "Naïve café owners 😀 agree. " * 30_000
    texts = [f"prompt {index}" for index in range(3000)] + [long, "", "end"]
    assert len(texts[-3]) > 100 * INLINE_CHARACTERS
    expected = tuple(tuple(reference.encode(text).ids) for text in texts)
    assert _encode(runner, tokenizer, texts, limit=10**7) == expected


def test_a_tokenizer_without_a_start_token_adds_none(runner: asyncio.Runner, saved: bytes) -> None:
    bare = _changed(saved, post_processor=None)
    assert _encode(runner, bare, ["The sky"]) == _encode(runner, bare, ["The sky"], add=False)


def test_what_a_saved_tokenizer_cuts_and_pads_is_not_cut_or_padded(
    runner: asyncio.Runner, tokenizer: ModelTokenizer, saved: bytes
) -> None:
    cutting = Tokenizer.from_buffer(saved)
    cutting.enable_truncation(4)
    cutting.enable_padding(length=16, pad_id=0, pad_token="<s>")
    text = "The capital of France is Paris."
    assert _encode(runner, ModelTokenizer(cutting), [text]) == _encode(runner, tokenizer, [text])


def test_a_token_covers_a_bounded_length_of_text(tokenizer: ModelTokenizer, saved: bytes) -> None:
    widest = max(map(len, Tokenizer.from_buffer(saved).get_vocab()))
    assert tokenizer.characters_per_token_at_most == widest
    assert _changed(saved, normalizer={"type": "NFC"}).characters_per_token_at_most == 4 * widest


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
    ],
)
def test_where_text_may_be_dropped_no_length_is_hopeless(
    runner: asyncio.Runner, saved: bytes, changes: dict[str, Any]
) -> None:
    dropping = _changed(saved, **changes)
    assert dropping.characters_per_token_at_most is None
    assert len(_encode(runner, dropping, [" " * 100_000], add=False, limit=50_000)[0]) < 100_001


def test_a_hopeless_text_is_refused_by_its_index_with_a_bound_that_holds(
    runner: asyncio.Runner, tokenizer: ModelTokenizer, saved: bytes
) -> None:
    text = "The capital of France is Paris. " * 5_000
    true_count = len(Tokenizer.from_buffer(saved).encode(text).ids)
    for chosen in (tokenizer, _changed(saved, normalizer={"type": "Strip", "strip_left": True, "strip_right": True})):
        with pytest.raises(TextTooLong) as caught:
            _encode(runner, chosen, ["short", text], limit=512)
        assert caught.value.index == 1
        assert 512 < caught.value.at_least <= true_count
