"""The one exception of the client."""

from collections.abc import Mapping
from typing import Any

import httpx

# What the client itself finds, beside the codes that the API answers.
CONNECTION_FAILED = "connection_failed"
CORRUPTED_DOWNLOAD = "corrupted_download"
HARVEST_INCOMPLETE = "harvest_incomplete"
INVALID_ARGUMENT = "invalid_argument"
INVALID_ANSWER = "invalid_answer"
JOB_FAILED = "job_failed"
JOB_CANCELLED = "job_cancelled"
STILL_WAITING = "still_waiting"


class AcsError(Exception):
    """A request that was refused or failed, or files that are not what they should be.

    `status` is the HTTP status, None where no answer came or none was asked for. `code` is the API's code
    (`budget_exceeded`) or one of this module's (`connection_failed`). `param` names the field at fault, `request_id`
    finds the request in the server's log, and `retry_after` is the seconds that the server asked to wait, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        should_retry: bool = True,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.body = dict(body or {})

    def as_json(self) -> dict[str, Any]:
        """The error as the command prints it with `--json`."""
        return {
            "error": {
                "message": self.message,
                "code": self.code,
                "param": self.param,
                "status": self.status,
                "request_id": self.request_id,
            }
        }


def invalid_argument(message: str, *, param: str | None = None) -> AcsError:
    """An argument that no request could be made of."""
    return AcsError(message, code=INVALID_ARGUMENT, param=param)


def error_of(answer: httpx.Response) -> AcsError:
    """The error in an answer whose body has been read; a body that is not the API's (a proxy's page) counts too."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    known = error if isinstance(error, dict) else {}
    return AcsError(
        str(known.get("message") or f"The server answered {answer.status_code} {answer.reason_phrase}."),
        code=str(known.get("code") or ("server_error" if answer.status_code >= 500 else INVALID_ANSWER)),
        status=answer.status_code,
        param=known.get("param"),
        request_id=(body.get("request_id") if known else None) or answer.headers.get("X-Request-Id"),
        retry_after=retry_after_seconds(answer.headers.get("Retry-After")),
        should_retry=answer.headers.get("x-should-retry") != "false",
        body=body if known else None,
    )


def retry_after_seconds(header: str | None) -> float | None:
    """The seconds of a `Retry-After`; None without one, or where it is a date (the API sends seconds)."""
    if header is None or not header.strip().isascii() or not header.strip().isdigit():
        return None
    return float(header)
