"""Which modules of a vLLM model are its decoder blocks."""

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
