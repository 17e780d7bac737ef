"""The vLLM engine arguments that an operator may set on a Base model: an allow-list, with their types and ranges.

Nothing here loads code (`trust_remote_code`, `worker_cls`, `hf_overrides` and the like stay out), and nothing here
changes what the capture relies on (pipeline parallelism, speculative decoding, dual-batch overlap).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError

EngineArg = bool | int | float | str


@dataclass(frozen=True)
class ArgType:
    """What one argument takes: `kind`, with bounds for numbers (`low` is left out where `above_low`), or `choices`."""

    kind: type[bool] | type[int] | type[float] | type[str]
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """In words, for error messages and help."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        noun = "a whole number" if self.kind is int else "a number"
        if self.low is not None and self.high is not None:
            return f"{noun} {'over' if self.above_low else 'from'} {self.low:g} to {self.high:g}"
        return f"{noun}, {self.low:g} or more" if self.low is not None else noun

    def accepts(self, value: object) -> bool:
        """Whether `value` has this type and lies in its range; a bool is no number."""
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            return isinstance(value, str) and value in self.choices
        numeric = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, numeric):
            return False
        # Not `value < low`: a NaN must fail too.
        low, high = self.low if self.low is not None else -(2**63), self.high if self.high is not None else 2**63 - 1
        return low <= value <= high and not (self.above_low and value == low)


SWITCH = ArgType(bool)
COUNT = ArgType(int, low=1)

ALLOWED: Mapping[str, ArgType] = {
    "async_scheduling": SWITCH,
    "attention_backend": ArgType(
        str,
        choices=("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHMLA", "CUTLASS_MLA", "CPU_ATTN"),
    ),
    "block_size": ArgType(int, low=1, high=1024),
    "cpu_offload_gb": ArgType(float, low=0),
    "disable_cascade_attn": SWITCH,
    "disable_custom_all_reduce": SWITCH,
    "disable_sliding_window": SWITCH,
    "distributed_executor_backend": ArgType(str, choices=("uni", "mp", "ray")),
    "enable_chunked_prefill": SWITCH,
    "enable_expert_parallel": SWITCH,
    "enable_prefix_caching": SWITCH,
    "enforce_eager": SWITCH,
    "gpu_memory_utilization": ArgType(float, low=0, high=1, above_low=True),
    "kv_cache_dtype": ArgType(str, choices=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
    "load_format": ArgType(str, choices=("auto", "safetensors", "fastsafetensors", "runai_streamer")),
    "long_prefill_token_threshold": ArgType(int, low=0),
    "max_num_batched_tokens": COUNT,
    "max_parallel_loading_workers": COUNT,
    "model_impl": ArgType(str, choices=("auto", "vllm", "transformers")),
    "num_gpu_blocks_override": COUNT,
    "optimization_level": ArgType(int, low=0, high=3),
    "quantization": ArgType(
        str,
        choices=(
            "awq",
            "awq_marlin",
            "bitsandbytes",
            "compressed-tensors",
            "fp8",
            "gptq",
            "gptq_marlin",
            "modelopt",
            "mxfp4",
        ),
    ),
    "safetensors_load_strategy": ArgType(str, choices=("lazy", "eager", "prefetch")),
    "seed": ArgType(int, low=0, high=2**31 - 1),
}

# Why a well-known argument is not on the list.
REFUSED: Mapping[str, str] = {
    "dtype": "it is a field of the model itself",
    "kv_cache_memory_bytes": "it is a field of the model itself (kv_cache_bytes)",
    "max_model_len": "it is a field of the model itself",
    "max_num_seqs": "it is a field of the model itself",
    "model": "it is the model's source",
    "revision": "it is a field of the model itself",
    "served_model_name": "it is a field of the model itself",
    "tensor_parallel_size": "it is a field of the model itself",
    "pipeline_parallel_size": "pipeline parallelism is refused until the capture is proven under it",
    "speculative_config": "speculative decoding is refused until the capture is proven under it",
    "enable_dbo": "dual-batch overlap is refused until the capture is proven under it",
    "trust_remote_code": "a checkpoint's own code is never run",
    "hf_overrides": "it may load code",
    "worker_cls": "it loads code",
    "worker_extension_cls": "it loads code",
    "scheduler_cls": "it loads code",
    "logits_processors": "it loads code",
}


def check_engine_args(args: object, *, context_length: int | None = None) -> dict[str, EngineArg]:
    """Return `args` when each is on the list and in its range; else raise a ValidationError with a sentence for each.

    `context_length` is the context that the engine will have: without chunked prefill a step must hold a whole prompt.
    """
    if not isinstance(args, dict):
        raise ValidationError('The engine arguments must be an object, such as {"enforce_eager": true}.')
    wrong = [sentence for name, value in args.items() if (sentence := _fault(name, value))]
    step_tokens = args.get("max_num_batched_tokens")
    if (
        not wrong
        and args.get("enable_chunked_prefill") is False
        and context_length is not None
        and step_tokens is not None
        and step_tokens < context_length
    ):
        wrong.append(
            f"Without chunked prefill, max_num_batched_tokens ({step_tokens}) must hold the context ({context_length})."
        )
    if wrong:
        raise ValidationError(wrong)
    return args


def parse_engine_arg(text: str) -> tuple[str, EngineArg]:
    """Read `key=value` of a command line, the value by the argument's type; raises ValidationError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValidationError(f"{text!r} is not key=value.")
    arg_type = ALLOWED.get(name)
    if arg_type is None:
        raise ValidationError(_fault(name, value) or "")
    parsed: Any = value
    try:
        if arg_type.kind is bool:
            parsed = {"true": True, "false": False}.get(value.lower(), value)
        elif arg_type.kind is not str:
            parsed = arg_type.kind(value)
    except ValueError:
        pass
    if fault := _fault(name, parsed):
        raise ValidationError(fault)
    return name, parsed


def _fault(name: object, value: object) -> str | None:
    if not isinstance(name, str) or name not in ALLOWED:
        reason = REFUSED.get(str(name))
        listed = reason if reason else "allowed are " + ", ".join(ALLOWED)
        return f"The engine argument {name} can't be set: {listed}."
    if not ALLOWED[name].accepts(value):
        return f"The engine argument {name} must be {ALLOWED[name].describe()}, not {value!r}."
    return None
