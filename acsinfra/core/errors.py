"""Every error of the API: `{"error": {"message", "type", "code", "param"}}`, whatever the status."""

import functools
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import psycopg
import redis.exceptions
import structlog
from django.core.exceptions import SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404
from kombu.exceptions import OperationalError as BrokerError
from rest_framework import exceptions as drf
from rest_framework.response import Response

logger = structlog.get_logger(__name__)


class ErrorCode(StrEnum):
    """The codes of the API, each with its status and type below."""

    INVALID_REQUEST = "invalid_request"
    BAD_JSON = "bad_json"
    MODEL_NOT_FOUND = "model_not_found"
    HARVEST_UNSUPPORTED = "harvest_unsupported"
    CORPUS_TOO_LARGE = "corpus_too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    ACTIVATION_PROMPT_TOO_LONG = "activation_prompt_too_long"
    FULL_VOCAB_PROMPT_TOO_LONG = "full_vocab_prompt_too_long"
    CHAT_COMPLETIONS_UNSUPPORTED = "chat_completions_unsupported"
    INVALID_API_KEY = "invalid_api_key"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TOO_LARGE = "request_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    JOB_CANCELLED = "job_cancelled"
    JOB_RESULT_EXPIRED = "job_result_expired"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    BUDGET_EXCEEDED = "budget_exceeded"
    JOB_CAPACITY = "job_capacity"
    SPEND_CAP = "spend_cap"
    HARVEST_CONCURRENCY_EXCEEDED = "harvest_concurrency_exceeded"
    HARVEST_QUOTA_EXCEEDED = "harvest_quota_exceeded"
    INTERNAL_ERROR = "internal_error"
    JOB_FAILED = "job_failed"
    ENGINE_ERROR = "engine_error"
    MODEL_UNAVAILABLE = "model_unavailable"
    MODEL_STARTING = "model_starting"
    HARVEST_UNAVAILABLE = "harvest_unavailable"
    SERVICE_UNAVAILABLE = "service_unavailable"
    ENGINE_TIMEOUT = "engine_timeout"


STATUS_OF_CODE: Mapping[ErrorCode, int] = {
    ErrorCode.INVALID_API_KEY: 401,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.REQUEST_TOO_LARGE: 413,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorCode.IDEMPOTENCY_CONFLICT: 409,
    ErrorCode.IDEMPOTENCY_IN_PROGRESS: 409,
    ErrorCode.JOB_CANCELLED: 409,
    ErrorCode.JOB_RESULT_EXPIRED: 410,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.BUDGET_EXCEEDED: 429,
    ErrorCode.JOB_CAPACITY: 429,
    ErrorCode.SPEND_CAP: 429,
    ErrorCode.HARVEST_CONCURRENCY_EXCEEDED: 429,
    ErrorCode.HARVEST_QUOTA_EXCEEDED: 429,
    ErrorCode.INTERNAL_ERROR: 500,
    ErrorCode.JOB_FAILED: 500,
    ErrorCode.ENGINE_ERROR: 502,
    ErrorCode.MODEL_UNAVAILABLE: 503,
    ErrorCode.MODEL_STARTING: 503,
    ErrorCode.HARVEST_UNAVAILABLE: 503,
    ErrorCode.SERVICE_UNAVAILABLE: 503,
    ErrorCode.ENGINE_TIMEOUT: 504,
}


def error_type(status: int) -> str:
    """The `type` that goes with a status, as OpenAI's clients know it."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error. Any layer may raise it; the API turns it into the error object.

    `extra` stands beside `error` in the body (such as `job_id`); `headers` go into the answer.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status if status is not None else STATUS_OF_CODE.get(code, 400)
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, object]:
        """The JSON body of this error."""
        error = {"message": self.message, "type": error_type(self.status), "code": self.code.value, "param": self.param}
        return {"error": error, **self.extra}


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """A `400 invalid_request` for `param`."""
    return ApiError(ErrorCode.INVALID_REQUEST, message, param=param)


def printable(name: str) -> str:
    """A name out of a request, safe and short enough for a message or a `param`."""
    text = name.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\u0000")
    return text if len(text) <= 100 else text[:100] + "…"


def not_found(message: str = "There is nothing here.") -> ApiError:
    """The one `404 not_found`, of an id that never existed as of another User's."""
    return ApiError(ErrorCode.NOT_FOUND, message)


def service_unavailable() -> ApiError:
    """A `503 service_unavailable`: the database, the broker or the storage is away."""
    return ApiError(
        ErrorCode.SERVICE_UNAVAILABLE,
        "A part of this service is away for the moment. Try again.",
        headers={"Retry-After": "5"},
    )


@functools.cache
def _away() -> tuple[type[Exception], ...]:
    """What the clients of the database, the broker and the storage raise when those are away."""
    from acsinfra.core.storage import StorageUnavailableError

    return (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        OperationalError,
        InterfaceError,
        redis.exceptions.ConnectionError,
        redis.exceptions.TimeoutError,
        redis.exceptions.OutOfMemoryError,
        redis.exceptions.ReadOnlyError,
        BrokerError,
        StorageUnavailableError,
        ConnectionError,
    )


# How a Redis begins its answer that takes no writes for the moment: its disk is full, or its replicas are gone.
_REFUSALS = ("MISCONF", "NOREPLICAS")


def _is_refusal(error: BaseException | None) -> bool:
    return isinstance(error, redis.exceptions.ResponseError) and str(error).startswith(_REFUSALS)


def is_part_away(error: BaseException | None) -> bool:
    """Whether `error` says that the database, the broker or the storage is away for the moment."""
    return isinstance(error, _away()) or _is_refusal(error)


def api_error_of(error: Exception) -> ApiError:
    """The answer to `error`: an ApiError itself, what DRF and Django raise, a part that is away, else a logged 500."""
    match error:
        case ApiError():
            return error
        case drf.MethodNotAllowed():
            return ApiError(ErrorCode.METHOD_NOT_ALLOWED, "This route does not take this method.")
        case drf.NotAuthenticated() | drf.AuthenticationFailed():
            return invalid_api_key()
        case drf.UnsupportedMediaType():
            return ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The body must be sent as application/json.")
        case drf.ParseError():
            return ApiError(ErrorCode.BAD_JSON, "The body is not JSON.")
        case drf.NotFound() | Http404():
            return not_found()
        case SuspiciousOperation():
            return invalid("The request is malformed.")
        case drf.APIException() if error.status_code < 500:
            return error_of_status(error.status_code)
    if is_part_away(error):
        logger.error("a part is away", error_type=type(error).__name__, exc_info=error)
        return service_unavailable()
    logger.error("unexpected error", exc_info=error)
    return ApiError(ErrorCode.INTERNAL_ERROR, "Something went wrong here. Send us the request id and we will look.")


def error_of_status(status: int) -> ApiError:
    """The error that goes with a bare status, for what failed outside any view."""
    for code, message in (
        (ErrorCode.NOT_FOUND, "There is nothing here."),
        (ErrorCode.METHOD_NOT_ALLOWED, "This route does not take this method."),
        (ErrorCode.REQUEST_TOO_LARGE, "The body is too large."),
        (ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The body must be sent as application/json."),
    ):
        if STATUS_OF_CODE[code] == status:
            return ApiError(code, message)
    if status >= 500:
        return ApiError(ErrorCode.INTERNAL_ERROR, "Something went wrong here.", status=status)
    return ApiError(ErrorCode.INVALID_REQUEST, "The request is malformed.", status=status)


def invalid_api_key() -> ApiError:
    """The one answer to a key that is missing, wrong, paused, expired or revoked, or of a User who is not active."""
    return ApiError(
        ErrorCode.INVALID_API_KEY,
        "The API key is missing or not valid. Send one as Authorization: Bearer <key>.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def exception_handler(error: Exception, context: Mapping[str, Any]) -> Response:
    """DRF's hook: `error` as an answer."""
    answer = api_error_of(error)
    view = context.get("view")
    if answer.code is ErrorCode.METHOD_NOT_ALLOWED and view is not None:
        answer.headers["Allow"] = ", ".join(view.allowed_methods)
    response = Response(answer.body(), status=answer.status, headers=answer.headers)
    response.error_code = answer.code.value  # type: ignore[attr-defined]
    return response
