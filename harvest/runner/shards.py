"""The safetensors file of a shard, whose header is known before any of its values is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from harvest.runner.corpus import TokenisedPrompt

# safetensors' names of dtypes and their bytes.
SAFETENSORS_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ITEM_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
HEADER_ALIGNMENT: Final = 8


@dataclass(frozen=True)
class ShardLayout:
    """A shard of consecutive prompts: `prompt_{i}` [layers, tokens, columns] of `dtype`, `tokens_{i}` int32 [tokens].

    `dtype` is safetensors' name. The ids of all prompts lie first, then the values in the order of the prompts: so
    every tensor is aligned to its items, which torch wants, and the values can be written as they come.
    """

    index: int
    prompts: Sequence[TokenisedPrompt]
    n_layers: int
    n_columns: int
    dtype: str

    @property
    def name(self) -> str:
        """The file's name."""
        return f"shard_{self.index:05}.safetensors"

    def shape(self, prompt: TokenisedPrompt) -> tuple[int, int, int]:
        """The shape of a prompt's values."""
        return self.n_layers, len(prompt.token_ids), self.n_columns

    def value_bytes(self, prompt: TokenisedPrompt) -> int:
        """The bytes of a prompt's values."""
        return self.n_layers * len(prompt.token_ids) * self.n_columns * ITEM_BYTES[self.dtype]

    def header(self) -> bytes:
        """The file's beginning, up to its first tensor."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for prompt in self.prompts:
            end = offset + prompt.token_ids.nbytes
            entries[f"tokens_{prompt.index}"] = _entry("I32", (len(prompt.token_ids),), offset, end)
            offset = end
        for prompt in self.prompts:
            end = offset + self.value_bytes(prompt)
            entries[f"prompt_{prompt.index}"] = _entry(self.dtype, self.shape(prompt), offset, end)
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def beginning(self) -> Iterator[bytes]:
        """All that can be written before the first values: the header and the ids."""
        yield self.header()
        for prompt in self.prompts:
            yield prompt.token_ids.astype("<i4", copy=False).tobytes()

    def file_bytes(self) -> int:
        """The length of the whole file."""
        tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return len(self.header()) + tokens * (4 + self.n_layers * self.n_columns * ITEM_BYTES[self.dtype])


def lay_out_shards(
    prompts: Sequence[TokenisedPrompt], *, shard_size: int, n_layers: int, n_columns: int, dtype: str
) -> list[ShardLayout]:
    """The shards of a run, `shard_size` prompts each."""
    return [
        ShardLayout(number, prompts[start : start + shard_size], n_layers, n_columns, dtype)
        for number, start in enumerate(range(0, len(prompts), shard_size))
    ]


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
