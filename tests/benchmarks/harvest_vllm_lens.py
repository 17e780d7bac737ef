"""vllm-lens offline, in an environment of its own (`bench harvest --peers`): a line of JSON in, one out.

`python harvest_vllm_lens.py CHECKPOINT DTYPE TOKENS_FILE` says `{}` when it is loaded; `{"layers": […]}` is answered
with the seconds for all prompts. It runs where nothing of this project is installed, vllm 0.30.0 and vllm-lens 1.3.0.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer until standard input closes."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    checkpoint, dtype, tokens_file = sys.argv[1:]
    token_ids = json.loads(Path(tokens_file).read_text())
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        # All in one process, on every core: as fast as it goes, and as our own engine is.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "ACTIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(model=checkpoint, dtype=dtype, enforce_eager=True, enable_prefix_caching=False, block_size=32)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        layers = json.loads(line)["layers"]
        wanted = {"output_residual_stream": layers}
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        sampling = [SamplingParams(max_tokens=1, temperature=0, extra_args=dict(wanted)) for _ in prompts]
        began, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        captured = [getattr(output, "activations", None) for output in outputs]
        rows = sum(tensors["residual_stream"].shape[1] for tensors in captured if tensors)
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "rows": rows, "rows_due": sum(map(len, token_ids))}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
