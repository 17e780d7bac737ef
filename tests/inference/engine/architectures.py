"""Tiny seeded models of other architectures: each hands the residual stream on in its own way.

`python -m tests.inference.engine.architectures [NAME…]` makes the models, reads and steers each with HuggingFace and
with a harvest engine, and prints how far they are apart.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from inference.engine.activations import to_float32
from inference.engine.fork_server import start_fork_server
from tests.inference.engine.conftest import prepare_once
from tests.inference.engine.reference import Float32Array, run_with_huggingface
from tests.inference.engine.requests import ALL_LAYERS, HIDDEN, make_prompt, make_request, make_values, make_vector
from tests.tiny_model import make_tiny_model

PROMPT = make_prompt(50, seed=1)
STEERED_LAYER = 1
STEERED_SPAN = (5, 40)
_COMMON = {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_WIDE_HEADS = {**_LLAMA_LIKE, "head_dim": 32}
# Every second block attends to the 16 last tokens only, so that the prompt is longer than the window.
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA = {**_WIDE_HEADS, "query_pre_attn_scalar": 32, **_WINDOWS}
_PLAIN = {**_COMMON, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """A configuration of HuggingFace's, where its blocks are, and how vLLM 0.32 hands on the residual stream there."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=lambda: _LLAMA_LIKE)
    kind: str = "sum"
    blocks: str = "model.layers"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _WIDE_HEADS),
    "gemma2": Architecture("gemma2", _GEMMA),
    "gemma3": Architecture("gemma3_text", _GEMMA),
    "phi3": Architecture("phi3", {**_LLAMA_LIKE, "original_max_position_embeddings": 512}),
    "mixtral": Architecture("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "afmoe": Architecture(
        "afmoe",
        {
            **_WIDE_HEADS,
            **_WINDOWS,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "mup_enabled": True,
            # In the checkpoints, and read by vLLM; HuggingFace's own configuration has no default for them.
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt2": Architecture(
        "gpt2", {**_COMMON, "n_embd": HIDDEN, "n_layer": 4, "n_head": 2, "n_positions": 512}, "first", "transformer.h"
    ),
    "opt": Architecture(
        "opt",
        {**_PLAIN, "ffn_dim": 128, "max_position_embeddings": 512, "word_embed_proj_dim": HIDDEN},
        "first",
        "model.decoder.layers",
    ),
    "falcon": Architecture("falcon", {**_PLAIN, "max_position_embeddings": 512}, "first", "transformer.h"),
    "granite": Architecture(
        "granite",
        {**_LLAMA_LIKE, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        "first",
    ),
    "cohere": Architecture("cohere", {**_LLAMA_LIKE, "logit_scale": 1.0}, "first"),
    "gpt_neox": Architecture("gpt_neox", _LLAMA_LIKE, "first", "gpt_neox.layers"),
    "olmo2": Architecture("olmo2", _LLAMA_LIKE, "first"),
}
# Four streams side by side, which no single tensor [tokens, hidden] stands for: the engine must not serve it.
PARALLEL_STREAMS = Architecture(
    "gemma3n_text",
    {
        **_WIDE_HEADS,
        **_WINDOWS,
        "intermediate_size": [128] * 4,
        "vocab_size_per_layer_input": 640,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
    },
)


@dataclass(frozen=True)
class Streams:
    """What was read of one model: the residual stream [layers, tokens, hidden], plain and steered."""

    plain: Float32Array
    steered: Float32Array
    kind: str = ""


def make_tiny_architecture(folder: Path, architecture: Architecture) -> Path:
    """Write a random model of 4 blocks, float32, with the tiny model's tokenizer; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder)
    config = AutoConfig.for_model(architecture.model_type, **architecture.fields)
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


def make_steering() -> Float32Array:
    """Return the vector [hidden] that is added after STEERED_LAYER at the positions of STEERED_SPAN."""
    vector: Float32Array = make_values(1, HIDDEN, seed=3)[0]
    return vector


def make_and_read_with_huggingface(folder: Path, architecture: Architecture) -> Streams:
    """Make the model and read what each of its blocks gives. Runs apart from vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = make_tiny_architecture(folder, architecture)
    model = AutoModelForCausalLM.from_pretrained(
        # The other implementations leave out Gemma 2's cap of the attention's logits.
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    blocks = model.get_submodule(architecture.blocks)

    def read(vector: torch.Tensor | None) -> Float32Array:
        rows: list[torch.Tensor] = []

        def keep(layer: int, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if vector is not None and layer == STEERED_LAYER:
                hidden[0, slice(*STEERED_SPAN)] += vector
            rows.append(hidden[0].clone())

        hooks = [
            block.register_forward_hook(lambda _module, _inputs, output, layer=index: keep(layer, output))
            for index, block in enumerate(blocks)
        ]
        model(torch.tensor([PROMPT]))
        for hook in hooks:
            hook.remove()
        stream: Float32Array = torch.stack(rows).numpy()
        return stream

    with torch.no_grad():
        return Streams(read(None), read(torch.from_numpy(make_steering())))


def read_with_the_engine(
    folder: Path, *, dtype: Literal["bfloat16", "float32"] = "float32", halved: bool = False
) -> Streams:
    """Return what a harvest engine of the model captures. Raises EngineRefused where it does not serve it.

    `halved` runs a Llama whose blocks hand on a pair that is neither plain nor a sum.
    """
    prepare_once()
    if halved:
        _make_llama_halve_its_deltas()
    from inference.engine.harvest import HarvestEngine, _drive
    from inference.wire import EngineOptions

    options = EngineOptions(checkpoint=str(folder), dtype=dtype, kv_cache_bytes=16 * 1024**2, max_num_seqs=8)
    engine = HarvestEngine.start(options, name="tests-architectures")
    captured: list[Float32Array] = []

    async def answer() -> None:
        vector = make_vector(make_steering()[None], (STEERED_LAYER,), position_spans=(STEERED_SPAN,))
        for steering in ((), (vector,)):
            request = make_request(PROMPT, capture=ALL_LAYERS, steering=steering, max_tokens=1)
            _, activations = await engine.answer(request)
            assert activations is not None
            captured.append(to_float32(activations.array, activations.dtype))

    try:
        _drive(answer())
        (worker,) = engine.describe_workers()
        plain, steered = captured
        return Streams(plain, steered, worker["stream_kind"])
    finally:
        engine.shutdown()


def _make_llama_halve_its_deltas() -> None:
    """Have vLLM run Llamas, from now on in this process, whose norms add half of what the block before them gives."""
    from vllm import ModelRegistry
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class HalvingNorm(RMSNorm):
        def forward(self, x: Any, residual: Any = None) -> Any:
            return super().forward(x, None) if residual is None else super().forward(x * 0.5, residual)

    class HalvingLlama(LlamaForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.__class__ = HalvingNorm

    ModelRegistry.register_model("LlamaForCausalLM", HalvingLlama)


def run_apart[Result](calls: Sequence[Callable[[], Result]], *, with_vllm: bool = True) -> list[Result | Exception]:
    """Make these calls, which can be pickled, one after the other in one new process; a failure is its exception.

    The process has imported vLLM already, or nothing.
    """
    results: list[Result | Exception] = []
    prepare_once()
    if with_vllm:
        start_fork_server()
    context = multiprocessing.get_context("forkserver" if with_vllm else "spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for call in calls:
            try:
                results.append(pool.submit(call).result())
            except Exception as error:  # noqa: BLE001 (it is this one's result)
                results.append(error)
    return results


def relative_error(got: Float32Array, expected: Float32Array) -> float:
    """Return the largest error of a row, relative to its length."""
    return float(row_errors(got, expected).max())


def row_errors(got: Float32Array, expected: Float32Array) -> Float32Array:
    """Return the error of each row, relative to its length: [layers, tokens]."""
    assert got.shape == expected.shape
    errors: Float32Array = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return errors


def main(names: Sequence[str]) -> int:
    """Print one line for each of the architectures; 1 when one is not as it should be."""
    everything = {**ARCHITECTURES, "gemma3n": PARALLEL_STREAMS}
    chosen = {name: everything[name] for name in names or ARCHITECTURES}
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        folders = {Path(root) / name: architecture for name, architecture in chosen.items()}
        expected = run_with_huggingface([partial(make_and_read_with_huggingface, *one) for one in folders.items()])
        captured = run_apart([partial(read_with_the_engine, folder) for folder in folders])
    sys.stdout.write(f"{'':14} {'stream':7} {'capture':>9} {'steering':>9}   largest error of a row, of its length\n")
    for (name, architecture), right, got in zip(chosen.items(), expected, captured, strict=True):
        if isinstance(got, Exception):
            sys.stdout.write(f"{name:14} {got}\n")
            failed = 1
            continue
        errors = relative_error(got.plain, right.plain), relative_error(got.steered, right.steered)
        failed |= got.kind != architecture.kind or max(errors) > 1e-5
        sys.stdout.write(f"{name:14} {got.kind:7} {errors[0]:9.1e} {errors[1]:9.1e}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
