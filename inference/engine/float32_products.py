"""Matrix products of a bfloat16 or float16 model, in float32 where the CPU has nothing faster.

vLLM 0.32 asks oneDNN for the products of such weights. Where the CPU has neither AMX nor AVX-512, oneDNN has none, and
what vLLM falls back to is several times slower than float32 on the same cores.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import psutil
import structlog
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit, get_cgroup_memory_usage

logger = structlog.get_logger(__name__)

# What is left to the engine beside its weights and its KV cache.
_RESERVE_BYTES = 1024**3
_PRIMITIVES_KEPT = 32
_choose_of_vllm = utils.dispatch_cpu_unquantized_gemm


def multiply_in_float32(*, kv_cache_bytes: int) -> None:
    """Have the models that this process loads from now on multiply in float32 where that is faster; call it on a CPU.

    The weights of such a linear layer are kept in float32, which takes twice their memory; its inputs are widened and
    its results rounded to the model's dtype. A layer stays as vLLM makes it when less than `kv_cache_bytes` and 1 GiB
    of memory would be left.
    """
    choose = partial(_choose, kept_free=kv_cache_bytes + _RESERVE_BYTES)
    utils.dispatch_cpu_unquantized_gemm = choose


def _choose(layer: Any, remove_weight: bool, *, kept_free: int) -> None:
    """Give a layer its product, `layer.cpu_linear`, as vLLM's function of that place does."""
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or not is_slow(weight.dtype):
        _choose_of_vllm(layer, remove_weight)
        return
    needed = weight.numel() * torch.float32.itemsize
    if _available_memory() - needed < kept_free:
        _warn_once()
        _choose_of_vllm(layer, remove_weight)
        return
    handler = ops.create_onednn_mm(weight.detach().float().t(), _PRIMITIVES_KEPT)
    layer.cpu_linear = _product(handler, weight.dtype)
    if remove_weight:
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)


@cache
def is_slow(dtype: torch.dtype) -> bool:
    """Whether oneDNN has no product of this dtype on this CPU, and has others."""
    if dtype not in (torch.bfloat16, torch.float16) or not ops._supports_onednn:
        return False
    try:
        ops.create_onednn_mm(torch.zeros(64, 64, dtype=dtype), _PRIMITIVES_KEPT)
    except RuntimeError:
        return True
    return False


@cache
def _warn_once() -> None:
    logger.warning("not all layers multiply in float32, which is faster: there is no memory for their weights")


def _product(handler: Any, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def multiply(x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return ops.onednn_mm(handler, x.float(), wide_bias).to(dtype)

    return multiply


def _available_memory() -> int:
    """The bytes that this process may still take."""
    available = psutil.virtual_memory().available
    limit, usage = get_cgroup_memory_limit(), get_cgroup_memory_usage()
    return available if limit is None or usage is None else min(available, limit - usage)
