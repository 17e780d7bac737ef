"""The environment variables that vLLM wants set before it is imported."""

import os
import sys
from pathlib import Path

# Whether this process, or the one that it was forked from, prepared for engines that are not known yet.
_is_launcher = False


def prepare_launcher() -> None:
    """Set the environment of a process that imports vLLM for engines that are forked from it and share the machine."""
    global _is_launcher
    prepare_environment(checkpoint="", tensor_parallel_size=1, shares_machine=True)
    _is_launcher = True


def prepare_environment(
    *, checkpoint: str, tensor_parallel_size: int, shares_machine: bool, compile_cache: Path | None = None
) -> None:
    """Set this process's environment for one engine; call it before anything imports vllm or torch.

    `shares_machine` is True where the API or other work runs beside the engine on the same CPUs: its threads then
    sleep when they wait, and are not bound to cores. `compile_cache` is the folder where what is compiled is kept for
    the next start. Values that the operator set stay, but for those that decide
    where the engine's processes are. Raises `RuntimeError` when vllm was imported already, unless a launcher did.
    """
    if "vllm" in sys.modules and not (_is_launcher and shares_machine):
        raise RuntimeError("vllm was imported before its environment was prepared")
    if Path(checkpoint).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Standard output belongs to the command that runs the engine.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # On CPU, vLLM 0.32 saves its own form of a compiled model but can't load it; torch's caches serve both.
        "VLLM_USE_AOT_COMPILE": "0",
        # Captures and logprobs are proven on Runner V1.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "OMP_WAIT_POLICY": "PASSIVE" if shares_machine else "ACTIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if shares_machine else _share_cores(tensor_parallel_size),
    }.items():
        os.environ.setdefault(name, value)
    if compile_cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Unless this says 0, vLLM's CPU build turns one rank's executor into its multi-process one, which busy-waits.
    # An AsyncLLM has its core in a process of its own whatever this says; an LLMEngine has it in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def _share_cores(ranks: int) -> str:
    """Give each rank its share of this process's cores, in vLLM's notation: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // ranks)
    shares = [cores[rank * size : (rank + 1) * size] or cores[-1:] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in share) for share in shares)
