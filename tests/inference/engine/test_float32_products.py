"""Which linear layers multiply in float32, and what their products are."""

from pathlib import Path

import psutil
import pytest
import torch

from tests.inference.engine.conftest import prepare_once

OURS = "inference.engine.float32_products"


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Return the layers that were left to vLLM; on any CPU, 16-bit weights pass for slow here."""
    prepare_once()
    from vllm.model_executor.layers import utils

    left: list[torch.nn.Module] = []
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(f"{OURS}._choose_of_vllm", lambda layer, _remove_weight: left.append(layer))
    monkeypatch.setattr(f"{OURS}.is_slow", lambda dtype: dtype != torch.float32)
    return left


def ask_for_float32(*, kv_cache_bytes: int = 0) -> None:
    from inference.engine.float32_products import multiply_in_float32

    multiply_in_float32(kv_cache_bytes=kv_cache_bytes)


def choose(layer: torch.nn.Module, *, remove_weight: bool = True) -> None:
    """Have the layer's product chosen, as vLLM does when it has loaded the weights."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers import utils

    return utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias)


def layer_of(dtype: torch.dtype, *, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(7)
    return torch.nn.Linear(96, 80, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (37,), (3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_float32_s_rounded_to_the_dtype(
    choices: list[torch.nn.Module], dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    layer = layer_of(dtype, bias=bias)
    x = torch.randn(*shape, 96, dtype=dtype)
    wide_bias = layer.bias.double() if bias else None
    truth = torch.nn.functional.linear(x.double(), layer.weight.double(), wide_bias)
    ask_for_float32()
    choose(layer)
    assert layer.weight.shape == (0,)
    product = multiply(layer, x)
    assert product.dtype == dtype
    # Half a step of the dtype, and float32's own error.
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(product.double(), truth, rtol=1.01 * half_a_step, atol=1e-5)
    assert choices == []


def test_weights_that_the_model_reads_elsewhere_stay() -> None:
    layer = layer_of(torch.bfloat16)
    before = layer.weight.clone()
    ask_for_float32()
    choose(layer, remove_weight=False)
    assert torch.equal(layer.weight, before)


def test_an_input_may_be_a_transposed_view() -> None:
    layer = layer_of(torch.bfloat16)
    x = torch.randn(96, 5, dtype=torch.bfloat16).t()
    ask_for_float32()
    choose(layer, remove_weight=False)
    product = multiply(layer, x)
    assert torch.equal(product, multiply(layer, x.contiguous()))


def test_layers_of_one_weight_share_its_copy() -> None:
    embeddings, head = layer_of(torch.bfloat16), layer_of(torch.bfloat16)
    head.weight = embeddings.weight
    ask_for_float32()
    for layer in (embeddings, head):
        choose(layer, remove_weight=False)
    assert head.cpu_linear is embeddings.cpu_linear


def test_other_layers_are_left_to_vllm(choices: list[torch.nn.Module]) -> None:
    wide = layer_of(torch.float32)
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.zeros(2, 8, 8, dtype=torch.bfloat16))
    missing = torch.nn.Linear(8, 8, dtype=torch.bfloat16, device="meta")
    ask_for_float32()
    for layer in (wide, experts, missing):
        choose(layer)
    assert choices == [wide, experts, missing]


def test_a_layer_without_memory_for_its_copy_is_left_to_vllm(choices: list[torch.nn.Module]) -> None:
    layer = layer_of(torch.bfloat16)
    ask_for_float32(kv_cache_bytes=psutil.virtual_memory().total)
    choose(layer)
    assert choices == [layer]
    # What is asked for last is what holds.
    ask_for_float32()
    choose(layer)
    assert choices == [layer]


def test_a_copy_has_room_beside_what_it_is_made_of(
    choices: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(torch.bfloat16)
    copy = 96 * 80 * 4
    monkeypatch.setattr(f"{OURS}._RESERVE_BYTES", 0)
    ask_for_float32()
    monkeypatch.setattr(f"{OURS}._available_memory", lambda: 2 * copy - 1)
    choose(layer, remove_weight=False)
    assert choices == [layer]
    monkeypatch.setattr(f"{OURS}._available_memory", lambda: 2 * copy)
    choose(layer, remove_weight=False)
    assert choices == [layer]


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_files_that_a_cgroup_caches_are_no_memory_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prefix: str
) -> None:
    stat = tmp_path / "memory.stat"
    stat.write_text(f"anon 5\nactive_file 40\ninactive_file 60\n{prefix}active_file 400\n{prefix}inactive_file 600\n")
    monkeypatch.setattr(f"{OURS}._CGROUP_STATS", (tmp_path / "absent", stat))
    monkeypatch.setattr(f"{OURS}.get_cgroup_memory_limit", lambda: 5000)
    monkeypatch.setattr(f"{OURS}.get_cgroup_memory_usage", lambda: 3000)
    from inference.engine.float32_products import _available_memory

    assert _available_memory() == 3000
