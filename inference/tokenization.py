"""Text to token ids with a checkpoint's own `tokenizer.json`: what an engine would read, without the engine."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import zstandard
from tokenizers import Tokenizer, pre_tokenizers

from inference.checkpoints import MAX_TOKENIZER_BYTES

# About a millisecond's work: less isn't worth a thread, more would hold up the event loop. Each text has its own cost.
INLINE_CHARACTERS: Final = 2_048
CHARACTERS_OF_A_CALL: Final = 64
# Texts are encoded in blocks of this many characters, whose encodings (some 100 bytes a token) are dropped at once.
BLOCK_CHARACTERS: Final = 256 * 1024
# A text this many characters a token longer than the context is first tried by its beginning.
PROBE_CHARACTERS_PER_TOKEN: Final = 8
# NFC composes up to four characters (a letter and three marks) into one.
NFC_SHRINKS_BY: Final = 4

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")


class TextTooLong(Exception):
    """The text at `index` has more tokens than the limit: at least `at_least`; it was not tokenised whole."""

    def __init__(self, index: int, at_least: int) -> None:
        super().__init__(f"text {index} has at least {at_least} tokens")
        self.index = index
        self.at_least = at_least


class ModelTokenizer:
    """A checkpoint's tokenizer; shared by all requests, safe in threads.

    `characters_per_token_at_most` bounds how much text one token covers; None where the tokenizer may drop text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A saved tokenizer.json may cut or pad on its own.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.characters_per_token_at_most = _characters_per_token(tokenizer)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, limit: int
    ) -> tuple[tuple[int, ...], ...]:
        """The token ids of each text, off the event loop when they are long.

        `add_special_tokens` lets the tokenizer add what its post-processor says (a BOS). Raises TextTooLong for a text
        that surely has more than `limit` tokens; one that was tokenised may still be longer than that.
        """
        self._refuse_hopeless(texts, limit)
        if sum(map(len, texts)) + CHARACTERS_OF_A_CALL * len(texts) <= INLINE_CHARACTERS:
            return self._encode_block(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, self._encode_long, texts, add_special_tokens, limit)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included: how an echo shows a prompt that was given in ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _refuse_hopeless(self, texts: Sequence[str], limit: int) -> None:
        widest = self.characters_per_token_at_most
        if widest is None:
            return
        for index, text in enumerate(texts):
            if len(text) > widest * limit:
                raise TextTooLong(index, -(-len(text) // widest))

    def _encode_long(self, texts: Sequence[str], add_special_tokens: bool, limit: int) -> tuple[tuple[int, ...], ...]:
        for index, text in enumerate(texts):
            self._probe(index, text, limit)
        encoded: list[tuple[int, ...]] = []
        for block in _blocks(texts):
            encoded.extend(self._encode_block(block, add_special_tokens))
        return tuple(encoded)

    def _probe(self, index: int, text: str, limit: int) -> None:
        """Refuse a long text by a beginning that has too many tokens already, so that 10 MiB are soon answered.

        A cut changes the tokens near it alone; a quarter of the count is far more than that.
        """
        size = max(PROBE_CHARACTERS_PER_TOKEN * limit, 2 * INLINE_CHARACTERS)
        while size * 2 < len(text):
            (ids,) = self._encode_block([text[:size]], False)
            if len(ids) * 3 // 4 > limit:
                raise TextTooLong(index, len(ids) * 3 // 4)
            size *= 4

    def _encode_block(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[tuple[int, ...], ...]:
        # The batch call alone releases the GIL, and it keeps no offsets.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return tuple(tuple(encoding.ids) for encoding in encodings)


def load_tokenizer(tokenizer_zstd: bytes) -> ModelTokenizer:
    """The tokenizer of a row of CheckpointFiles. Takes a large vocabulary a second: not for the event loop."""
    content = zstandard.ZstdDecompressor().decompress(tokenizer_zstd, max_output_size=MAX_TOKENIZER_BYTES)
    return ModelTokenizer(Tokenizer.from_buffer(content))


def _blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        if block and size + len(text) > BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
        block.append(text)
        size += len(text)
    if block:
        yield block


def _characters_per_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of text that one token stands for, when every character surely ends in some token.

    That holds for a byte-level or byte-fallback BPE without steps that drop text. Byte-level tokens are written with a
    character for each byte, so their length bounds the characters too.
    """
    described = json.loads(tokenizer.to_str())
    model, added = described["model"], described.get("added_tokens") or []
    splitters = list(_steps(described.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_steps(described.get("normalizer"), "normalizers"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in splitters)
    every_byte = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    covers_bytes = (is_byte_level or model.get("byte_fallback")) and all(byte in vocabulary for byte in every_byte)
    keeps_text = all(
        step["type"] in ("ByteLevel", "Digits", "Metaspace") or step.get("behavior", "Removed") != "Removed"
        for step in splitters
    )
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)
    if model["type"] != "BPE" or not covers_bytes or not keeps_text or swallows:
        return None
    shrinks_by = 1
    for step in normalizers:
        if step["type"] == "NFC":
            shrinks_by = NFC_SHRINKS_BY
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern) > len(step["content"]):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks_by * max(map(len, vocabulary))


def _steps(step: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[name]:
            yield from _steps(inner, name)
    else:
        yield step
