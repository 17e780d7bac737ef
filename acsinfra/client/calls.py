"""The requests of both clients, made without sending them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypedDict
from urllib.parse import quote

import httpx

from acsinfra.client.connection import Call
from acsinfra.client.errors import CONNECTION_FAILED, AcsError, invalid_argument
from acsinfra.client.models import CompletionChunk, CompletionJob, HarvestJob
from acsinfra.client.tensors import WireTensor

type Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
WAIT_AT_MOST_SECONDS: Final = 60
# A GET answers at once, or after what it was asked to wait; a Job's result may be large.
READ_SECONDS: Final = 60.0


class CompletionOptions(TypedDict, total=False):
    """The fields of `POST /v1/completions` beside `model` and `prompt`, as the API's reference has them."""

    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    logprobs: int
    prompt_logprobs: int
    echo: bool
    add_special_tokens: bool
    user: str
    logit_bias: Mapping[str, float]
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    allowed_token_ids: Sequence[int]
    logprob_token_ids: Sequence[int]
    return_token_ids: bool
    output_residual_stream: bool | Sequence[int]


class HarvestOptions(TypedDict, total=False):
    """The fields of `POST /v1/harvest` beside `model` and `prompts`; `project_onto` is `encode_tensor`'s."""

    layers: Sequence[int] | Literal["all"]
    shard_size: int
    batch_size: int
    add_special_tokens: bool
    project_onto: WireTensor


def as_json(body: Mapping[str, Any]) -> bytes:
    """The body of a request. Raises AcsError (`invalid_argument`) for what JSON, or UTF-8, has no form of."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError) as error:
        raise invalid_argument(f"The request cannot be written as JSON: {error}") from None


def completion(
    model: str,
    prompt: Prompt,
    options: CompletionOptions,
    steering_vectors: Sequence[Mapping[str, Any]],
    *,
    idempotency_key: str | None = None,
    stream: bool = False,
) -> Call:
    """`POST /v1/completions`."""
    body = _completion_body(model, prompt, options, steering_vectors)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Call(
        method="POST",
        path="completions",
        content=as_json(body),
        headers={} if idempotency_key is None else {IDEMPOTENCY_KEY: idempotency_key},
        is_repeatable=idempotency_key is not None,
    )


def completion_job(
    model: str,
    prompt: Prompt,
    options: CompletionOptions,
    steering_vectors: Sequence[Mapping[str, Any]],
    *,
    idempotency_key: str,
) -> Call:
    """`POST /v1/completion-jobs`."""
    body = _completion_body(model, prompt, options, steering_vectors)
    headers = {IDEMPOTENCY_KEY: idempotency_key}
    return Call(method="POST", path="completion-jobs", content=as_json(body), headers=headers)


def harvest(model: str, prompts: Sequence[str], options: HarvestOptions, *, idempotency_key: str) -> Call:
    """`POST /v1/harvest`; the caller decides what to do about a key with too many unfinished jobs."""
    body = {"model": model, "prompts": list(prompts), **options}
    headers = {IDEMPOTENCY_KEY: idempotency_key}
    return Call(method="POST", path="harvest", content=as_json(body), headers=headers)


def get(path: str, **params: Any) -> Call:
    """A GET; parameters that are None are left out."""
    given = {name: value for name, value in params.items() if value is not None}
    return Call(method="GET", path=path, params=given, timeout_s=given.get("wait", 0) + READ_SECONDS)


def post(path: str) -> Call:
    """A POST without a body that may be sent twice: the cancels."""
    return Call(method="POST", path=path)


def one(folder: str, ident: str, *rest: str) -> str:
    """The path of one object, whatever characters its id has."""
    return "/".join((folder, quote(ident, safe=""), *rest))


@contextmanager
def stream_breaks_are_told() -> Iterator[None]:
    """A block that reads a stream: a connection that is lost meanwhile is AcsError (`connection_failed`)."""
    try:
        yield
    except httpx.TransportError as failure:
        raise AcsError(f"The stream broke off: {failure}", code=CONNECTION_FAILED) from failure


def chunk_of_line(line: str) -> CompletionChunk | None:
    """A line of a stream; None for what carries nothing. Raises AcsError for an error frame."""
    if not line.startswith("data:") or (text := line[5:].strip()) == "[DONE]":
        return None
    try:
        frame = json.loads(text)
        error = frame.get("error")
    except (ValueError, AttributeError) as problem:
        raise AcsError("A part of the stream is not JSON.", code="invalid_answer") from problem
    if error is not None:
        raise AcsError(str(error.get("message")), code=str(error.get("code")), param=error.get("param"), body=frame)
    return CompletionChunk.from_json(frame)


def require_success(job: HarvestJob | CompletionJob) -> None:
    """Raise AcsError (`job_failed`, `job_cancelled`) for a job that ended otherwise."""
    if job.status in ("failed", "cancelled"):
        why = getattr(job, "error", None) or f"It ended {job.status}."
        raise AcsError(f"Job {job.id}: {why}", code=f"job_{job.status}", body=job.raw)


def _completion_body(
    model: str, prompt: Prompt, options: CompletionOptions, steering_vectors: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": prompt, **options}
    if steering_vectors:
        body["apply_steering_vectors"] = list(steering_vectors)
    return body
