"""The errors in the OpenAPI document: which code comes with which status, and an example of each.

The examples are real: `tests/reference/test_examples.py` provokes them and compares.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from acsinfra.core.errors import ApiError, ErrorCode

# A code, or a code with a status that is not its usual one.
type ErrorAt = ErrorCode | tuple[ErrorCode, int]

NO_RETRY: Final[Mapping[str, str]] = {"x-should-retry": "false"}


@dataclass(frozen=True)
class ErrorDoc:
    """An example of one code: message, param, the headers of its answer, and what stands beside `error`."""

    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)


ERROR_DOCS: Final[Mapping[ErrorCode, ErrorDoc]] = {
    ErrorCode.INVALID_REQUEST: ErrorDoc("max_tokens must be at least 0 and at most 32,000.", "max_tokens"),
    ErrorCode.BAD_JSON: ErrorDoc("The body is not JSON: Expecting value at line 1, column 12."),
    ErrorCode.MODEL_NOT_FOUND: ErrorDoc(
        "The model 'nothing' does not exist here; GET /v1/models lists those that do.", "model"
    ),
    ErrorCode.HARVEST_UNSUPPORTED: ErrorDoc("smollm2-135m takes no Harvest jobs.", "model"),
    ErrorCode.CORPUS_TOO_LARGE: ErrorDoc(
        "prompts has 8,000,001 characters in all; a job takes at most 8,000,000.", "prompts"
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorDoc(
        "The prompt's 3 tokens plus max_tokens 9,000 are 9,003; the context of smollm2-135m is 8,192 tokens.",
        "max_tokens",
    ),
    ErrorCode.ACTIVATION_PROMPT_TOO_LONG: ErrorDoc(
        "The prompt has 5,001 tokens; with 30 of 30 layers asked for, at most 3,883 are taken.", "prompt"
    ),
    ErrorCode.FULL_VOCAB_PROMPT_TOO_LONG: ErrorDoc(
        "prompt_logprobs -1 is taken for at most 81 prompt tokens in a request to smollm2-135m, and the prompts have "
        "120 (each of the n choices counts).",
        "prompt",
    ),
    ErrorCode.CHAT_COMPLETIONS_UNSUPPORTED: ErrorDoc(
        "These are Base models: they complete text and have no chat format. Use POST /v1/completions."
    ),
    ErrorCode.INVALID_API_KEY: ErrorDoc(
        "The API key is missing or not valid. Send one as Authorization: Bearer <key>.",
        headers={"WWW-Authenticate": "Bearer"},
    ),
    ErrorCode.NOT_FOUND: ErrorDoc("There is nothing here."),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorDoc("This route does not take this method.", headers={"Allow": "GET, OPTIONS"}),
    ErrorCode.REQUEST_TOO_LARGE: ErrorDoc("The body is too large: at most 10,485,760 bytes are taken here."),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: ErrorDoc("The body must be sent with Content-Type: application/json, in UTF-8."),
    ErrorCode.IDEMPOTENCY_CONFLICT: ErrorDoc(
        "This Idempotency-Key was used for another request within the last 24 hours. Use another key.",
        "Idempotency-Key",
        NO_RETRY,
    ),
    ErrorCode.IDEMPOTENCY_IN_PROGRESS: ErrorDoc(
        "A request with this Idempotency-Key is being answered. Ask again for its answer.",
        "Idempotency-Key",
        {"Retry-After": "1"},
    ),
    ErrorCode.JOB_CANCELLED: ErrorDoc("This Job was cancelled.", headers=NO_RETRY),
    ErrorCode.JOB_RESULT_EXPIRED: ErrorDoc("The result of this Job has expired."),
    ErrorCode.RATE_LIMITED: ErrorDoc(
        "This API key may send 600 requests a minute; there is room again in 12 s.", headers={"Retry-After": "12"}
    ),
    ErrorCode.QUEUE_FULL: ErrorDoc(
        "This key has 16 requests running and 64 waiting, which is all it may have.", headers={"Retry-After": "1"}
    ),
    ErrorCode.BUDGET_EXCEEDED: ErrorDoc(
        "This needs 32,005 tokens, and 4,711 of your Budget are left until the month ends, at "
        "2026-12-01T00:00:00.000+00:00.",
        headers=NO_RETRY,
    ),
    ErrorCode.JOB_CAPACITY: ErrorDoc(
        "You have 100 unfinished Jobs, as many as you may. Wait for one to end, or cancel it.",
        headers={"Retry-After": "5"},
    ),
    ErrorCode.SPEND_CAP: ErrorDoc(
        "The Spend limit of this day is reached, until 2026-11-30T00:00:00.000+00:00. Reading goes on.",
        headers={"Retry-After": "4217"},
    ),
    ErrorCode.HARVEST_CONCURRENCY_EXCEEDED: ErrorDoc(
        "This API key has 1 unfinished Harvest job, as many as it may. Wait for one to end, or cancel it.",
        headers={"Retry-After": "30"},
    ),
    ErrorCode.HARVEST_QUOTA_EXCEEDED: ErrorDoc(
        "This API key has submitted its 20 Harvest jobs of this month; a new month begins a new count.",
        headers=NO_RETRY,
    ),
    ErrorCode.INTERNAL_ERROR: ErrorDoc("Something went wrong here. Send us the request id and we will look."),
    ErrorCode.JOB_FAILED: ErrorDoc(
        "The result of this Job was lost.",
        headers=NO_RETRY,
        extra={"request_id": "req_job_01a19d8b28927afa8b5135c9fc2f5572"},
    ),
    ErrorCode.ENGINE_ERROR: ErrorDoc("The engine died under this request."),
    ErrorCode.MODEL_UNAVAILABLE: ErrorDoc("No engine is running for smollm2-135m."),
    ErrorCode.MODEL_STARTING: ErrorDoc(
        "An engine for smollm2-135m is loading; try again in about 20 s.", headers={"Retry-After": "20"}
    ),
    ErrorCode.HARVEST_UNAVAILABLE: ErrorDoc(
        "No runner is there for smollm2-135m. Try again later.",
        extra={"job_id": "019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10"},
    ),
    ErrorCode.SERVICE_UNAVAILABLE: ErrorDoc(
        "A part of this service is away for the moment. Try again.", headers={"Retry-After": "5"}
    ),
    ErrorCode.ENGINE_TIMEOUT: ErrorDoc("The engine did not finish within its time limit."),
}

_HEADERS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "WWW-Authenticate": ("How to authenticate.", {"type": "string", "const": "Bearer"}),
    "Retry-After": ("Seconds after which to try again.", {"type": "integer", "minimum": 1}),
    "x-should-retry": (
        "`false` where a retry cannot help; the openai client heeds it.",
        {"type": "string", "const": "false"},
    ),
}


class ErrorDetailSerializer(serializers.Serializer[Any]):
    """What went wrong."""

    message = serializers.CharField(help_text="A sentence or two for a person.")
    type = serializers.ChoiceField(
        choices=["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"],
        help_text="The kind of error, as OpenAI's clients know it.",
    )
    code = serializers.ChoiceField(choices=[code.value for code in ErrorCode], help_text="What to branch on.")
    param = serializers.CharField(
        allow_null=True,
        help_text="The field that is wrong, dotted, with indexes: `apply_steering_vectors.0.layer_indices`.",
    )


class ErrorSerializer(serializers.Serializer[Any]):
    """Every error of the API, whatever its status."""

    error = ErrorDetailSerializer()
    request_id = serializers.CharField(required=False, help_text="Of a Job's failed result: the Job's request_id.")
    job_id = serializers.UUIDField(required=False, help_text="Of `harvest_unavailable`: the job kept for support.")


def error_responses(errors: Iterable[ErrorAt]) -> dict[int, OpenApiResponse]:
    """The responses that are errors, by status; each lists its codes and has an example of each."""
    by_status: defaultdict[int, list[ApiError]] = defaultdict(list)
    for error in map(error_example, errors):
        by_status[error.status].append(error)
    return {
        status: OpenApiResponse(
            ErrorSerializer,
            description=", ".join(f"`{error.code.value}`" for error in found),
            examples=[OpenApiExample(error.code.value, value=error.body(), response_only=True) for error in found],
        )
        for status, found in sorted(by_status.items())
    }


def error_headers(errors: Iterable[ErrorAt]) -> list[OpenApiParameter]:
    """The headers of those responses."""
    statuses: defaultdict[str, set[int]] = defaultdict(set)
    for error in map(error_example, errors):
        for name in error.headers:
            statuses[name].add(error.status)
    return [
        OpenApiParameter(
            name,
            _HEADERS[name][1],
            OpenApiParameter.HEADER,
            description=_HEADERS[name][0],
            response=sorted(found),
        )
        for name, found in statuses.items()
    ]


def error_example(error: ErrorAt) -> ApiError:
    """The example of a code, as the error that the API would raise."""
    code, status = error if isinstance(error, tuple) else (error, None)
    doc = ERROR_DOCS[code]
    return ApiError(code, doc.message, param=doc.param, status=status, headers=doc.headers, extra=doc.extra)
