"""HuggingFace's forward with hooks, as people harvest without a server: a line of JSON in, one out.

`python -m tests.benchmarks.harvest_huggingface CHECKPOINT DTYPE TOKENS_FILE` says `{}` when the model is loaded. It
then answers `{"batch_size": n, "layers": […], "prompts": n}` with the seconds for that many of the prompts.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def read(model: Any, token_ids: Sequence[Sequence[int]], layers: Sequence[int], batch_size: int) -> dict[str, float]:
    """Read the prompts in batches of about one length, keep each one's rows after `layers`.

    Returns the seconds, of the clock and of the CPU.
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int, output: Any) -> None:
        kept[layer] = output[0] if isinstance(output, tuple) else output

    hooks = [
        model.model.layers[layer].register_forward_hook(lambda _m, _i, output, layer=layer: keep(layer, output))
        for layer in layers
    ]
    began, cpu = time.perf_counter(), time.process_time()
    by_length = sorted(token_ids, key=len)
    try:
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            longest = max(map(len, batch))
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros(len(batch), longest, dtype=torch.long)
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)] = torch.tensor(prompt)
                mask[row, : len(prompt)] = 1
            with torch.inference_mode():
                # The body alone: a harvest needs no logits.
                model.model(input_ids=ids, attention_mask=mask, use_cache=False)
            for row, prompt in enumerate(batch):
                torch.stack([kept[layer][row, : len(prompt)] for layer in layers])
    finally:
        for hook in hooks:
            hook.remove()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def main() -> None:
    """Answer until standard input closes."""
    answers, sys.stdout = sys.stdout, sys.stderr
    checkpoint, dtype, tokens_file = sys.argv[1:]
    token_ids = json.loads(Path(tokens_file).read_text())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = read(model, token_ids[: asked["prompts"]], asked["layers"], asked["batch_size"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
