"""Recipes to copy: one Job from a shell script, and the reading of a harvest's files in Python."""

import json
from typing import Any, Final

from inference.wire import CompletionWork, Sampling

# A longer body does not belong in a command line.
BODY_AT_MOST: Final = 32_000

SHELL: Final = """#!/bin/sh
# Runs one Job to its end and prints its result. Run it again after a lost connection: it is the same Job.
set -eu
: "${{ACS_API_BASE:={base}/v1}}"
: "${{ACS_API_KEY:?Set ACS_API_KEY to one of your keys}}"
JOB_KEY={job_key}   # another one for each piece of work

curl -sS --fail-with-body "$ACS_API_BASE/completion-jobs" \\
  -H "Authorization: Bearer $ACS_API_KEY" \\
  -H "Content-Type: application/json" \\
  -H "Idempotency-Key: $JOB_KEY" \\
  -d {body} > job.json || {{ cat job.json >&2; exit 1; }}
JOB_ID=$(sed -n 's/.*"id": *"\\([^"]*\\)".*/\\1/p' job.json)

while :; do
  STATUS=$(curl -sS "$ACS_API_BASE/completion-jobs/$JOB_ID" -H "Authorization: Bearer $ACS_API_KEY" |
    sed -n 's/.*"status": *"\\([^"]*\\)".*/\\1/p')
  case $STATUS in
    succeeded | failed | cancelled) break ;;
    *) echo "$JOB_ID: ${{STATUS:-no answer}}" >&2; sleep 1 ;;
  esac
done

curl -sS --fail-with-body "$ACS_API_BASE/completion-jobs/$JOB_ID/result" -H "Authorization: Bearer $ACS_API_KEY"
"""

READ_HARVEST: Final = """import json, os, urllib.request
from safetensors.torch import load

def fetch(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers)).read()

base = os.environ.get("ACS_API_BASE", "{base}/v1")
key = os.environ["ACS_API_KEY"]
job = json.loads(fetch(f"{{base}}/harvest/{job_id}", Authorization=f"Bearer {{key}}"))
result = job["result"]  # its links need no key, and work for days; each answer has new ones

for url in result["shard_urls"]:
    shard = load(fetch(url))
    for name in shard:
        if name.startswith("prompt_"):
            i = int(name.removeprefix("prompt_"))  # the prompt's index in the request
            {tensor} = shard[name]  # [layers, tokens, {last_axis}]
            tokens = shard[f"tokens_{{i}}"]  # [tokens], the ids that the model read
            print(i, tuple({tensor}.shape), {tensor}.dtype, len(tokens))

stats = load(fetch(result["stats_url"]))  # mean, std: [layers, {last_axis}] for layers {layers}
"""


def shell_recipe(body: dict[str, Any], *, base: str, job_key: str) -> str | None:
    """A script that submits `body` as a Job, waits and fetches; None for a body too long for a command line."""
    text = json.dumps(body, ensure_ascii=False)
    if len(text) > BODY_AT_MOST:
        return None
    quoted = "'" + text.replace("'", "'\\''") + "'"
    return SHELL.format(base=base, job_key=job_key, body=quoted)


def harvest_recipe(*, job_id: str, base: str, layers: list[int], is_projected: bool) -> str:
    """Python that reads the files of a done Harvest job."""
    return READ_HARVEST.format(
        base=base,
        job_id=job_id,
        layers=layers,
        tensor="projections" if is_projected else "activations",
        last_axis="directions" if is_projected else "hidden",
    )


_DEFAULTS: Final = Sampling(max_tokens=0)


def body_of(work: CompletionWork) -> dict[str, Any]:
    """The body that asks for `work`, with what differs from the defaults. Steering vectors are left out."""
    prompts = [list(ids) if text is None else text for ids, text in zip(work.prompts, work.prompt_texts, strict=True)]
    body: dict[str, Any] = {"model": work.model, "prompt": prompts[0] if len(prompts) == 1 else prompts}
    sampling = work.sampling
    body["max_tokens"] = sampling.max_tokens
    for name in sampling.__struct_fields__:
        value = getattr(sampling, name)
        if name != "max_tokens" and value != getattr(_DEFAULTS, name):
            body[name] = _plain(value)
    if work.echo:
        body["echo"] = True
        # Asked for by echo and logprobs together, not by the caller.
        if sampling.logprobs is not None:
            body.pop("prompt_logprobs", None)
    if work.return_token_ids:
        body["return_token_ids"] = True
    if work.user is not None:
        body["user"] = work.user
    if work.capture_layers:
        body["output_residual_stream"] = list(work.capture_layers)
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return {str(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
