"""The result of a Job as an HTTP answer: from its row, or streamed from storage."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import structlog
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.storage import ObjectNotFoundError, get_storage
from jobs.models import CompletionJob, JobResult
from jobs.serializers import is_result_expired
from jobs.services import job_failed

logger = structlog.get_logger(__name__)

# An ended Job's result stays what it is: the openai client would ask again for every 409, 429 and 500.
FINAL = {"x-should-retry": "false"}


@dataclass(frozen=True)
class _Stored:
    status: int
    body: bytes | None
    key: str
    bytes: int


async def answer_result(job: CompletionJob) -> HttpResponseBase:
    """The answer to a read of an ended Job's result. Raises ApiError where there is none to give."""
    if is_result_expired(job):
        raise _expired()
    if job.status == CompletionJob.Status.CANCELLED:
        raise ApiError(ErrorCode.JOB_CANCELLED, "This Job was cancelled.", headers=FINAL)
    stored = await database_step(_read, job)
    if stored.body is None:
        return await _stream(job, stored)
    headers = None if stored.status == 200 else FINAL
    return HttpResponse(stored.body, status=stored.status, content_type="application/json", headers=headers)


def _read(job: CompletionJob) -> _Stored:
    row = JobResult.objects.filter(job=job).first()
    if row is None:
        raise _gone(job)
    return _Stored(row.status, None if row.body is None else bytes(row.body), row.key, row.bytes)


async def _stream(job: CompletionJob, stored: _Stored) -> HttpResponseBase:
    """A large result, a chunk at a time as the client reads it."""
    storage = get_storage()
    try:
        if await asyncio.to_thread(storage.size, stored.key) != stored.bytes:
            raise await database_step(_gone, job)
        # With the first chunk at hand the status is surely right.
        chunks = storage.read_range(stored.key)
        first = await asyncio.to_thread(next, chunks, b"")
    except ObjectNotFoundError:
        raise await database_step(_gone, job) from None
    response = StreamingHttpResponse(
        _chunks(first, chunks, stored.bytes), status=stored.status, content_type="application/json"
    )
    response["Content-Length"] = str(stored.bytes)
    return response


async def _chunks(first: bytes, rest: Iterator[bytes], length: int) -> AsyncIterator[bytes]:
    chunk, sent = first, 0
    while chunk:
        sent += len(chunk)
        yield chunk
        chunk = await asyncio.to_thread(next, rest, b"")
    if sent != length:
        # The server closes the connection: the body is short of its Content-Length.
        raise OSError("a result became shorter while it was read")


def _expired() -> ApiError:
    return ApiError(ErrorCode.JOB_RESULT_EXPIRED, "The result of this Job has expired.")


def _gone(job: CompletionJob) -> ApiError:
    """Why a result is not there: it may have been erased since its Job was read."""
    is_erased = CompletionJob.objects.filter(pk=job.pk, is_erased=True).exists()
    return _expired() if is_erased else _lost(job)


def _lost(job: CompletionJob) -> ApiError:
    logger.error("the result of a job is not in storage", job_id=str(job.pk))
    error = job_failed("The result of this Job was lost.")
    error.extra["request_id"] = job.request_id
    error.headers.update(FINAL)
    return error
