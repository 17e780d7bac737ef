"""What vLLM itself answers: its own `LLM`, one request at a time, shaped by its own OpenAI server's code.

A program: reads `{"model": folder, "bodies": [...]}` from standard input, writes the answers to the file of its first
argument. It runs apart from the tests, because nothing of ours may be in its process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer each body."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_WAIT_POLICY="PASSIVE",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    asked = json.load(sys.stdin)
    from vllm import LLM

    llm = LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=4,
        enable_prefix_caching=False,
        generation_config="vllm",
        max_logprobs=-1,
    )
    answers = [answer(llm, body) for body in asked["bodies"]]
    Path(sys.argv[1]).write_text(json.dumps(answers))


def answer(llm: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `text_completion` object for `body`."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.sampling_params import RequestOutputKind

    tokenizer = llm.get_tokenizer()
    request = CompletionRequest(**body)
    params = request.to_sampling_params(request.max_tokens, {})
    params.output_kind = RequestOutputKind.FINAL_ONLY
    given = body["prompt"]
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    outputs = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        output.prompt = text
        outputs.append(output)
    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.return_tokens_as_token_ids = False
    serving.enable_prompt_tokens_details = False
    serving.enable_per_request_metrics = False
    serving.system_fingerprint = None
    response = serving.request_output_to_completion_response(
        outputs, request, "cmpl-reference", 0, "reference", tokenizer, RequestResponseMetadata(request_id="reference")
    )
    shaped: dict[str, Any] = json.loads(response.model_dump_json())
    return shaped


if __name__ == "__main__":
    main()
