"""Tiny seeded models of other architectures: each hands the residual stream on in another way."""

from pathlib import Path
from typing import Any

from tests.tiny_model import make_tiny_model

_COMMON = {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# What each is, by how vLLM 0.32 runs it; `model` is the path to the blocks in HuggingFace.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2, a plain tensor": (
        "gpt2",
        {**_COMMON, "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 512},
        "transformer.h",
    ),
    "gpt_neox, three axes by the Transformers backend": (
        "gpt_neox",
        {**_LLAMA_LIKE, "use_parallel_residual": False},
        "gpt_neox.layers",
    ),
    "cohere, the first of a pair": ("cohere", {**_LLAMA_LIKE, "logit_scale": 1.0}, "model.layers"),
    "qwen2, delta and residual": ("qwen2", _LLAMA_LIKE, "model.layers"),
}


def make_tiny_architecture(folder: Path, name: str) -> Path:
    """Write the model of this name, float32, with the tiny model's tokenizer; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder)
    model_type, fields, _ = ARCHITECTURES[name]
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.08)
                elif "norm" not in parameter_name and "ln_" not in parameter_name:
                    parameter.normal_(std=0.02)
    model.save_pretrained(folder)
    return folder


def find_blocks(model: Any, name: str) -> Any:
    """Return the decoder blocks of the HuggingFace model of this name."""
    return model.get_submodule(ARCHITECTURES[name][2])
