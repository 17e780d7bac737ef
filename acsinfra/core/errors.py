"""Every error of the API: `{"error": {"message", "type", "code", "param"}}`, whatever the status."""

from collections.abc import Mapping
from enum import StrEnum


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
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    HARVEST_CONCURRENCY_EXCEEDED = "harvest_concurrency_exceeded"
    HARVEST_QUOTA_EXCEEDED = "harvest_quota_exceeded"
    INTERNAL_ERROR = "internal_error"
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
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.HARVEST_CONCURRENCY_EXCEEDED: 429,
    ErrorCode.HARVEST_QUOTA_EXCEEDED: 429,
    ErrorCode.INTERNAL_ERROR: 500,
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
