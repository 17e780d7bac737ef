"""The corpus of a job as token ids: what the engine will read, known before it reads."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard
from tokenizers import Tokenizer

from harvest.models import HarvestCorpus, HarvestJob
from inference.models import BaseModel

# Texts are encoded some at a time: an encoding takes 100 bytes a token until it is dropped.
BLOCK_CHARACTERS: Final = 256 * 1024
# A text much longer than the context is encoded by its beginning.
PROBE_CHARACTERS_PER_TOKEN: Final = 8
PROBE_CHARACTERS_AT_LEAST: Final = 4_096
type TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenisedPrompt:
    """One prompt: the ids the engine reads, int32 [tokens], and whether its end was cut off."""

    index: int
    token_ids: TokenIds
    is_cut: bool


def tokenise_corpus(job: HarvestJob, model: BaseModel) -> list[TokenisedPrompt]:
    """The prompts of a job as `model` (with its `files`) reads them."""
    return tokenise(
        load_prompts(job.corpus),
        tokenizer=load_tokenizer(bytes(model.files.tokenizer_zstd)),
        add_special_tokens=job.add_special_tokens,
        tokens_at_most=model.effective_max_model_len - 1,
    )


def load_prompts(corpus: HarvestCorpus) -> list[str]:
    """The texts of a job, in their order."""
    prompts: list[str] = json.loads(zstandard.decompress(bytes(corpus.prompts_zstd)))
    return prompts


def tokenise(
    prompts: Sequence[str], *, tokenizer: Tokenizer, add_special_tokens: bool, tokens_at_most: int
) -> list[TokenisedPrompt]:
    """Each prompt's first `tokens_at_most` token ids; `add_special_tokens` lets the tokenizer add its own (a BOS)."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenised: list[TokenisedPrompt] = []
    for block in _blocks(prompts):
        for encoding in tokenizer.encode_batch_fast(block, add_special_tokens=add_special_tokens):
            tokenised.append(_cut(len(tokenised), encoding.ids, tokens_at_most, is_whole=True))
        for at in range(len(tokenised) - len(block), len(tokenised)):
            if len(prompts[at]) > BLOCK_CHARACTERS:
                tokenised[at] = _tokenise_long(at, prompts[at], tokenizer, add_special_tokens, tokens_at_most)
    return tokenised


def _blocks(prompts: Sequence[str]) -> list[list[str]]:
    """The prompts in runs of about `BLOCK_CHARACTERS`; of one that is longer stands "" here."""
    blocks: list[list[str]] = []
    size = 0
    for prompt in prompts:
        length = len(prompt) if len(prompt) <= BLOCK_CHARACTERS else 0
        if not blocks or size + length > BLOCK_CHARACTERS:
            blocks.append([])
            size = 0
        blocks[-1].append(prompt if length else "")
        size += length
    return blocks


def _tokenise_long(
    index: int, prompt: str, tokenizer: Tokenizer, add_special_tokens: bool, tokens_at_most: int
) -> TokenisedPrompt:
    """Encode only as much of a long text as its first tokens need.

    Where a text is cut, only the tokens near the cut change; the last quarter is never used.
    """
    size = max(PROBE_CHARACTERS_PER_TOKEN * tokens_at_most, PROBE_CHARACTERS_AT_LEAST)
    while True:
        is_whole = size >= len(prompt)
        ids: list[int] = tokenizer.encode(prompt[:size], add_special_tokens=add_special_tokens).ids
        if is_whole or len(ids) * 3 // 4 > tokens_at_most:
            return _cut(index, ids, tokens_at_most, is_whole=is_whole)
        size *= 4


def _cut(index: int, ids: list[int], tokens_at_most: int, *, is_whole: bool) -> TokenisedPrompt:
    return TokenisedPrompt(
        index=index,
        token_ids=np.asarray(ids[:tokens_at_most], dtype=np.int32),
        is_cut=not is_whole or len(ids) > tokens_at_most,
    )


@functools.lru_cache(maxsize=1)
def load_tokenizer(tokenizer_zstd: bytes) -> Tokenizer:
    """The tokenizer of a row of CheckpointFiles; kept from job to job, because making one takes as long as a short job.

    `tokenise` leaves nothing behind in it. One thread at a time.
    """
    return Tokenizer.from_buffer(zstandard.decompress(tokenizer_zstd))
