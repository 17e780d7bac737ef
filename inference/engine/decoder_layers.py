"""Which modules of a vLLM model are its decoder blocks."""

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


def find_decoder_layers(model: nn.Module, n_layers: int) -> nn.ModuleList:
    """Return the model's list of `n_layers` decoder blocks.

    It is the one list of that length whose blocks hold an attention (or Mamba) layer of the engine's; failing that,
    the one list of that length. Raises `LookupError` with a sentence when neither is unique.
    """
    of_length = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == n_layers]
    with_attention = [
        layers
        for layers in of_length
        if all(any(isinstance(part, AttentionLayerBase) for part in block.modules()) for block in layers)
    ]
    for candidates in (with_attention, of_length):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            break
    raise LookupError(f"no unique list of {n_layers} decoder blocks was found in {type(model).__name__}")


# vLLM 0.32 divides the residual stream of these by a constant in float16, against overflow: no test from within could
# tell, as the norms that read it don't.
_SCALED_IN_FLOAT16 = frozenset({"deepseek_v2", "AXK1", "openpangu"})


def require_unscaled_stream(layers: nn.ModuleList, dtype: torch.dtype) -> None:
    """Raise `LookupError` where the blocks' residual stream is not the model's own but a multiple of it."""
    if dtype != torch.float16:
        return
    for block in layers:
        sources = {kind.__module__.rpartition(".")[2] for kind in type(block).__mro__}
        if sources & _SCALED_IN_FLOAT16:
            raise LookupError(f"{type(block).__name__} scales its residual stream in float16; serve it in bfloat16")
