"""Matrix products of a bfloat16 or float16 model, in float32 where the CPU has nothing faster.

vLLM 0.32 asks oneDNN for the products of such weights. Where the CPU has neither AMX nor AVX-512, oneDNN has none, and
what vLLM falls back to is several times slower than float32 on the same cores.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
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
# Of cgroups v2 and v1.
_CGROUP_STATS = (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat"))
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
    # The embeddings and the head of a model may be one weight: two layers, one copy.
    product = getattr(weight, "float32_product", None)
    if product is None:
        needed = weight.numel() * torch.float32.itemsize
        # oneDNN makes its copy of another one.
        if _available_memory() - needed < max(kept_free, needed):
            _warn_once()
            _choose_of_vllm(layer, remove_weight)
            return
        handler = ops.create_onednn_mm(weight.detach().float().t(), _PRIMITIVES_KEPT)
        product = weight.float32_product = _product(handler, weight.dtype)
    layer.cpu_linear = product
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
        # As torch's own product does, this takes an input that is a view of another shape's memory.
        wide = x.to(torch.float32, memory_format=torch.contiguous_format)
        return ops.onednn_mm(handler, wide, wide_bias).to(dtype)

    return multiply


def _available_memory() -> int:
    """The bytes that this process may still take."""
    available = psutil.virtual_memory().available
    limit, usage = get_cgroup_memory_limit(), get_cgroup_memory_usage()
    return available if limit is None or usage is None else min(available, limit - usage + _cached_files())


def _cached_files() -> int:
    """The bytes of this cgroup's usage that cache files, such as the checkpoint's: they make way for what is asked."""
    for path in _CGROUP_STATS:
        if path.is_file():
            counts = dict(line.split() for line in path.read_text().splitlines())
            # In v1 the plain names leave out the cgroups within.
            return sum(int(counts.get(f"total_{name}", counts[name])) for name in ("active_file", "inactive_file"))
    return 0
