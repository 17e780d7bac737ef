"""Plain vLLM answering one token, with no line of ours in its processes: the pace of a machine.

`python -m tests.benchmarks.bare_engine [--requests N]` drives vLLM's AsyncLLM over the tiny model by one client, and
prints one object: `requests`, and their `p50_ms` and `p99_ms`. A time that the API adds means little without it: on
one machine with two cores that took 2.4 ms, on another 12.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from inference.engine.environment import prepare_environment
from tests.benchmarks.figures import quantiles

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WARM_UP = 64
PROMPT = (5, 6, 7, 8, 9, 10)


async def _measure(checkpoint: Path, requests: int) -> list[float]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(checkpoint),
            dtype="float32",
            max_num_seqs=64,
            kv_cache_memory_bytes=256 * 1024 * 1024,
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
    )
    try:
        return [await _answer(engine, str(number)) for number in range(WARM_UP + requests)][WARM_UP:]
    finally:
        engine.shutdown()


async def _answer(engine: "AsyncLLM", name: str) -> float:
    """Seconds of one request."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    async for _ in engine.generate(TokensPrompt(prompt_token_ids=list(PROMPT)), sampling, request_id=name):
        pass
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bare_engine")
    parser.add_argument("--requests", type=int, default=500)
    requests: int = parser.parse_args().requests
    # What else is printed here is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    with tempfile.TemporaryDirectory(prefix="acs-bench-") as folder:
        from tests.tiny_model import make_tiny_model

        checkpoint = make_tiny_model(Path(folder))
        prepare_environment(checkpoint=str(checkpoint), tensor_parallel_size=1, shares_machine=True)
        taken = quantiles(uvloop.run(_measure(checkpoint, requests)))
    found: dict[str, Any] = {"requests": requests, "p50_ms": round(taken.p50_ms, 3), "p99_ms": round(taken.p99_ms, 3)}
    print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
