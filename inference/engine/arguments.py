"""From our options to vLLM's engine arguments, and what is refused until captures are proven under it."""

from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from inference.engine.errors import EngineRefused
from inference.wire import EngineOptions

# vLLM imports it by this name in each worker process, and only there.
_WORKER_CLS = "inference.engine.worker.ResidualStreamWorker"
_CPU_KV_CACHE_BYTES = 1024**3
_CPU_BLOCK_SIZE = 32
# What a step has between two products should fit in the cache: SmolLM2 read a tenth less with vLLM's 2,048 tokens.
_CPU_STEP_TOKENS = 1024


def make_engine_arguments(options: EngineOptions, *, is_compiled: bool = False) -> AsyncEngineArgs:
    """Return the arguments of an engine for `options`. Raises `EngineRefused` for an argument vLLM lacks."""
    arguments: dict[str, Any] = {
        "model": options.checkpoint,
        "revision": options.revision,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "uni" if options.tensor_parallel_size == 1 else "mp",
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "max_logprobs": -1,
        "enforce_eager": not is_compiled,
        "disable_log_stats": True,
        "worker_cls": _WORKER_CLS,
    }
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes or _CPU_KV_CACHE_BYTES
        arguments["block_size"] = _CPU_BLOCK_SIZE
        if options.extra_args.get("enable_chunked_prefill", True):
            arguments["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, options.max_num_seqs)
    arguments.update(options.extra_args)
    if arguments["max_model_len"] is None:
        del arguments["max_model_len"]
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineRefused(f"vLLM refuses the engine's arguments: {error}") from error


def can_compile(options: EngineOptions) -> bool:
    """Say whether captures are proven with this engine compiled: one rank on a CPU.

    A GPU's prefill is bound by its arithmetic, which compiling does not change.
    """
    is_eager = options.extra_args.get("enforce_eager", False)
    return current_platform.is_cpu() and options.tensor_parallel_size == 1 and not is_eager


def make_vllm_config(options: EngineOptions, *, is_compiled: bool = False) -> VllmConfig:
    """Return vLLM's whole configuration for `options`.

    Raises `EngineRefused` where vLLM refuses, or where captures are not proven.
    """
    arguments = make_engine_arguments(options, is_compiled=is_compiled)
    try:
        config = arguments.create_engine_config()
    except (ValueError, RuntimeError, OSError, NotImplementedError, AssertionError) as error:
        raise EngineRefused(f"vLLM refuses this checkpoint or these options: {error}") from error
    refuse_unproven(config, is_compiled=is_compiled)
    return config


def refuse_unproven(config: VllmConfig, *, is_compiled: bool = False) -> None:
    """Raise `EngineRefused` for what would make captures or steering wrong, or has not been proven.

    `is_compiled` is for an engine that passed `can_compile`.
    """
    parallel, model = config.parallel_config, config.model_config
    architectures = " ".join(model.architectures or []).lower()
    unproven = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "dual-batch overlap": parallel.enable_dbo or parallel.ubatch_size > 0,
        "sequence-parallel experts": bool(parallel.use_sequence_parallel_moe),
        "LoRA": config.lora_config is not None,
        "pooling": model.runner_type != "generate",
        "CUDA graphs or torch.compile": config.compilation_config.mode != CompilationMode.NONE and not is_compiled,
        "DeepSeek in float16": "deepseek" in architectures and model.dtype == torch.float16,
    }
    for name, is_asked in unproven.items():
        if is_asked:
            raise EngineRefused(f"{name} is not served: captures are not proven under it")
