"""Completions with an Idempotency-Key: done once, to the end, and answered from what was kept.

The work runs in a task of its own, so that a client that goes away does not end it. Its key is free again if it was
refused before a worker had it; from then on whatever came of it is its answer, errors too.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import psycopg
import structlog
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from acsinfra.core import idempotency
from acsinfra.core.errors import ApiError, ErrorCode, api_error_of
from acsinfra.core.idempotency import IdempotentRequest, InProgress, RecordedAnswer
from acsinfra.core.storage import StorageError, get_storage
from inference.bus.api import Bus
from inference.bus.frames import Body, End
from inference.charges import RETRY_SECONDS, recorded_error
from inference.responses import Exchange

logger = structlog.get_logger(__name__)

ROUTE = "POST /v1/completions"
# How long a request waits for the answer to another with its key, before it is told to come again.
WAIT_SECONDS = 10.0
LOOK_SECONDS = (0.05, 0.5)


async def kept_answer(asked: IdempotentRequest) -> HttpResponseBase | None:
    """The answer that was given to the request before, waited for while it is being made; None: it is a new one.

    Raises `409 idempotency_conflict`, and `409 idempotency_in_progress` after WAIT_SECONDS.
    """
    kept = await _wait_for_answer(asked)
    return None if kept is None else await _response(kept)


async def answer_once(
    asked: IdempotentRequest, exchange: Exchange, *, begin: Callable[[], Awaitable[None]], bus: Bus
) -> HttpResponseBase:
    """Do the work of `exchange`, begun by `begin`, unless another request with the key does; and answer.

    Raises what `kept_answer` and `begin` raise.
    """
    running = bus.detach(_do_once(asked, exchange, begin, bus), name=f"once-{exchange.request_id}")
    return await _response(await asyncio.shield(running))


async def _do_once(
    asked: IdempotentRequest, exchange: Exchange, begin: Callable[[], Awaitable[None]], bus: Bus
) -> RecordedAnswer:
    reference = exchange.request_id
    while True:
        taken = await idempotency.begin_work(asked, holder=bus.process, reference=reference)
        if taken is None:
            break
        # Where the other is refused before any work, the key is free, and this one's turn has come.
        kept = taken if isinstance(taken, RecordedAnswer) else await _wait_for_answer(asked)
        if kept is not None:
            return kept
    try:
        await begin()
        answer = await _answer(exchange)
        # Before its Hold ends: whatever dies in between, the answer is there and a sweep charges it.
        await _surely(lambda: idempotency.record_answer(asked, reference=reference, answer=answer))
    except Exception as error:
        refusal = api_error_of(error)
        has_begun = exchange.has_begun(refusal)
        exchange.end()
        if not has_begun:
            await _surely(lambda: idempotency.forget_work(asked, reference=reference))
            raise refusal from error
        answer = recorded_error(refusal)
        await _surely(lambda: idempotency.record_answer(asked, reference=reference, answer=answer))
    finally:
        # Cancelled, this process stops and can wait no longer: a sweep ends the key, by what was charged.
        exchange.end()
    return answer


async def _answer(exchange: Exchange) -> RecordedAnswer:
    headers = {"Content-Type": "application/json"}
    frame = await exchange.next()
    assert isinstance(frame, Body)
    if frame.total > idempotency.INLINE_BYTES:
        return RecordedAnswer(200, headers, file=await _write_file(exchange, frame))
    body = bytearray()
    while isinstance(frame, Body):
        body += frame.data
        frame = await exchange.next()
    return RecordedAnswer(200, headers, bytes(body))


async def _write_file(exchange: Exchange, first: Body) -> str:
    """Write the answer to storage piece by piece as it comes, and return its key there."""
    key = idempotency.answer_file()
    try:
        writer = await asyncio.to_thread(get_storage().open_writer, key, expected_bytes=first.total)
        try:
            frame: object = first
            while isinstance(frame, Body):
                await asyncio.to_thread(writer.write, frame.data)
                frame = await exchange.next()
            assert isinstance(frame, End)
            await asyncio.to_thread(writer.close)
        finally:
            await asyncio.to_thread(writer.abort)
    except StorageError as error:
        logger.error("an answer could not be kept", reason=str(error))
        raise ApiError(
            ErrorCode.SERVICE_UNAVAILABLE,
            "The answer was made and could not be kept: the storage is away. Send the request with another "
            "Idempotency-Key to run it again.",
        ) from error
    return key


async def _wait_for_answer(asked: IdempotentRequest) -> RecordedAnswer | None:
    give_up_at = time.monotonic() + WAIT_SECONDS
    pause, longest = LOOK_SECONDS
    while True:
        outcome = await idempotency.find_answer(asked)
        if not isinstance(outcome, InProgress):
            return outcome
        if time.monotonic() >= give_up_at:
            raise idempotency.in_progress()
        await asyncio.sleep(pause)
        pause = min(longest, pause * 1.5)


async def _surely(step: Callable[[], Awaitable[None]]) -> None:
    """Run `step`, again and again while the database is away: a key must not stay in progress."""
    for attempt in itertools.count():
        try:
            await step()
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if attempt == 0:
                logger.warning("an idempotency key waits for the database", error=str(error))
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        else:
            return


async def _response(answer: RecordedAnswer) -> HttpResponseBase:
    if not answer.file:
        return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))
    size = await asyncio.to_thread(get_storage().size, answer.file)
    if size is None:
        raise ApiError(ErrorCode.SERVICE_UNAVAILABLE, "The kept answer is gone from the storage.")
    response = StreamingHttpResponse(_file(answer.file), status=answer.status, headers=dict(answer.headers))
    response["Content-Length"] = str(size)
    return response


async def _file(key: str) -> AsyncGenerator[bytes]:
    chunks = await asyncio.to_thread(get_storage().read_range, key)
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
