"""A shard written as a stream is the file that safetensors itself reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from harvest.runner.corpus import TokenisedPrompt
from harvest.runner.shards import ShardLayout, lay_out_shards

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def prompts_of(lengths: list[int]) -> list[TokenisedPrompt]:
    return [
        TokenisedPrompt(index, np.arange(length, dtype=np.int32) + 100 * index, is_cut=False)
        for index, length in enumerate(lengths)
    ]


def values_of(layout: ShardLayout) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.index)
    return {
        prompt.index: torch.randn(layout.shape(prompt), generator=generator).to(TORCH_DTYPES[layout.dtype])
        for prompt in layout.prompts
    }


def file_of(layout: ShardLayout, values: dict[int, torch.Tensor]) -> bytes:
    parts = [*layout.beginning(), *(_bytes(values[prompt.index]) for prompt in layout.prompts)]
    return b"".join(parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    array: np.ndarray[Any, Any] = tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else np.empty(0)
    return array.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 10),
    st.sampled_from(["BF16", "F16", "F32"]),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
)
def test_safetensors_reads_what_was_streamed(
    lengths: list[int], shard_size: int, dtype: str, n_layers: int, n_columns: int
) -> None:
    layouts = lay_out_shards(
        prompts_of(lengths), shard_size=shard_size, n_layers=n_layers, n_columns=n_columns, dtype=dtype
    )
    seen: list[int] = []
    for layout in layouts:
        assert len(layout.prompts) <= shard_size
        values = values_of(layout)
        content = file_of(layout, values)
        assert len(content) == layout.file_bytes()
        tensors = safetensors.torch.load(content)
        assert len(tensors) == 2 * len(layout.prompts)
        for prompt in layout.prompts:
            seen.append(prompt.index)
            assert torch.equal(tensors[f"prompt_{prompt.index}"], values[prompt.index])
            assert tensors[f"prompt_{prompt.index}"].dtype == TORCH_DTYPES[dtype]
            assert tensors[f"tokens_{prompt.index}"].dtype == torch.int32
            assert tensors[f"tokens_{prompt.index}"].tolist() == prompt.token_ids.tolist()
    assert seen == list(range(len(lengths)))


def test_a_shard_can_be_read_lazily_from_disk(tmp_path: Path) -> None:
    (layout,) = lay_out_shards(prompts_of([3, 1, 5]), shard_size=4096, n_layers=2, n_columns=3, dtype="BF16")
    values = values_of(layout)
    (tmp_path / layout.name).write_bytes(file_of(layout, values))
    with safe_open(tmp_path / layout.name, framework="pt") as file:
        assert torch.equal(file.get_slice("prompt_2")[1, 2:4], values[2][1, 2:4])
        assert file.get_tensor("tokens_1").tolist() == [100]


@pytest.mark.parametrize(("index", "name"), [(0, "shard_00000.safetensors"), (4_095, "shard_04095.safetensors")])
def test_shards_are_named_by_their_number(index: int, name: str) -> None:
    assert ShardLayout(index, [], 1, 1, "F32").name == name


def test_every_tensor_begins_where_its_items_want_to() -> None:
    (layout,) = lay_out_shards(prompts_of([1, 3, 7]), shard_size=8, n_layers=1, n_columns=1, dtype="BF16")
    content = file_of(layout, values_of(layout))
    header_bytes = int.from_bytes(content[:8], "little")
    assert header_bytes % 8 == 0
