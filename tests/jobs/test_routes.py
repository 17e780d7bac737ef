"""The answers of `/v1/completion-jobs/{id}` in every state, without a worker."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import AsyncClient
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import ApiKey, User
from accounts.services import create_key
from acsinfra.core.db import close_async_pool, database_step
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import idempotent_request
from acsinfra.core.storage import get_storage
from acsinfra.core.views import openapi_document
from inference.models import BaseModel
from jobs import running, services
from jobs.models import CompletionJob
from jobs.results import answer_result
from jobs.services import Answer
from tests.harvest.conftest import make_model, make_user
from tests.jobs.conftest import OWNER, assert_money, claim, claimed, submit
from tests.jobs.jobs import KEYS

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Rows:
    """A User with a key, and a model."""

    user: User
    key: ApiKey
    text: str
    model: BaseModel


def make_rows() -> Rows:
    user = make_user("ada")
    key, text = create_key(user=user, name="key")
    return Rows(user, key, text, make_model())


def make_job(rows: Rows, end: Callable[[CompletionJob], object] | None = None) -> CompletionJob:
    """Submit a Job and run it to an end; None leaves it in line."""
    job = submit(rows.user, rows.key, rows.model)
    if end is not None:
        claim(rows.model)
        end(job)
    job.refresh_from_db()
    return job


def succeed(job: CompletionJob) -> None:
    body = b'{"choices":[]}'
    answer = Answer(status=200, body=body, bytes=len(body))
    running.finish_job(job_id=job.pk, owner=OWNER, tokens=5, answer=answer)


def succeed_with_file(job: CompletionJob, *, data: bytes = b'{"choices":[1]}', is_kept: bool = True) -> None:
    running.note_files(job_id=job.pk, owner=OWNER)
    key = f"{job.storage_prefix}/result_1.json"
    if is_kept:
        get_storage().write(key, data)
    answer = Answer(status=200, key=key, bytes=len(b'{"choices":[1]}'))
    running.finish_job(job_id=job.pk, owner=OWNER, tokens=5, answer=answer)


def fail(code: ErrorCode) -> Callable[[CompletionJob], object]:
    return lambda job: running.fail_running_job(
        job_id=job.pk, owner=OWNER, tokens=5, error=ApiError(code, "It was so.", param="prompt")
    )


async def ask(method: str, path: str, rows: Rows) -> Any:
    """Return the answer of a route to the User, its body in `text`."""
    client = AsyncClient()
    headers = {"Authorization": f"Bearer {rows.text}"}
    return await client.generic(method, f"/v1/completion-jobs/{path}", headers=headers)


async def body_of(answer: Any) -> Any:
    if answer.streaming:
        return json.loads(b"".join([part async for part in answer.streaming_content]))
    return json.loads(answer.content)


async def test_the_result_of_each_end() -> None:
    try:
        rows = await database_step(make_rows)
        waiting = await database_step(make_job, rows)
        answer = await ask("GET", f"{waiting.pk}/result", rows)
        assert (answer.status_code, answer["Retry-After"]) == (202, "1")
        assert set(await body_of(answer)) == KEYS
        await database_step(services.cancel_job, job_id=waiting.pk)
        answer = await ask("GET", f"{waiting.pk}/result", rows)
        assert (answer.status_code, answer["x-should-retry"]) == (409, "false")
        assert (await body_of(answer))["error"]["code"] == "job_cancelled"

        for end, choices in ((succeed, []), (succeed_with_file, [1])):
            job = await database_step(make_job, rows, end)
            answer = await ask("GET", f"{job.pk}/result", rows)
            assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")
            assert (await body_of(answer))["choices"] == choices

        for code, status in (
            (ErrorCode.ENGINE_ERROR, 502),
            (ErrorCode.ENGINE_TIMEOUT, 504),
            (ErrorCode.SERVICE_UNAVAILABLE, 503),
            (ErrorCode.MODEL_NOT_FOUND, 400),
            (ErrorCode.BUDGET_EXCEEDED, 429),
            (ErrorCode.JOB_FAILED, 500),
        ):
            job = await database_step(make_job, rows, fail(code))
            answer = await ask("GET", f"{job.pk}/result", rows)
            assert answer.status_code == status
            body = await body_of(answer)
            assert set(body) == {"error", "request_id"}
            assert body["request_id"] == job.request_id != answer["X-Request-Id"]
            assert set(body["error"]) == {"message", "type", "code", "param"}
            assert (body["error"]["code"], body["error"]["message"]) == (code.value, "It was so.")
    finally:
        await close_async_pool()


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_result_that_storage_lost_or_cut_is_job_failed(is_gone: bool) -> None:
    try:
        rows = await database_step(make_rows)
        job = await database_step(make_job, rows, lambda job: succeed_with_file(job, data=b"{}", is_kept=not is_gone))
        answer = await ask("GET", f"{job.pk}/result", rows)
        body = await body_of(answer)
        assert (answer.status_code, body["error"]["code"]) == (500, "job_failed")
        assert body["request_id"] == job.request_id
    finally:
        await close_async_pool()


@pytest.mark.parametrize("is_swept", [True, False])
async def test_whatever_its_end_a_result_expires_and_the_job_stays(is_swept: bool) -> None:
    try:
        rows = await database_step(make_rows)
        jobs = [
            await database_step(make_job, rows, end)
            for end in (succeed, fail(ErrorCode.ENGINE_ERROR), lambda job: services.cancel_job(job_id=job.pk))
        ]

        def expire() -> None:
            CompletionJob.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
            if is_swept:
                services.erase_expired_results()

        await database_step(expire)
        for job in jobs:
            answer = await ask("GET", f"{job.pk}/result", rows)
            assert answer.status_code == 410
            assert (await body_of(answer))["error"]["code"] == "job_result_expired"
            stays = await body_of(await ask("GET", str(job.pk), rows))
            assert (stays["status"], stays["result_expired"]) == (job.status, True)
    finally:
        await close_async_pool()


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_result_that_is_erased_while_it_is_asked_for_has_expired(has_file: bool) -> None:
    try:
        rows = await database_step(make_rows)
        end = (lambda job: succeed_with_file(job, data=b"{}", is_kept=False)) if has_file else succeed
        job = await database_step(make_job, rows, end)
        if has_file:
            await database_step(CompletionJob.objects.update, is_erased=True)
        else:
            await database_step(services.erase_result, job_id=job.pk)
        with pytest.raises(ApiError) as refusal:
            await answer_result(job)
        assert refusal.value.code is ErrorCode.JOB_RESULT_EXPIRED
    finally:
        await close_async_pool()


async def test_a_cancel_waits_a_second_for_a_worker_that_says_nothing_and_charges_the_last_count() -> None:
    try:
        rows = await database_step(make_rows)
        await database_step(submit, rows.user, rows.key, rows.model)
        job = await database_step(claimed, rows.model)
        count = running.Count(id=job.pk, owner=OWNER, tokens=6)
        await database_step(running.look_after_jobs, [count], renew=True)
        began = time.monotonic()
        answer = await ask("POST", f"{job.pk}/cancel", rows)
        assert time.monotonic() - began > 0.9
        ended = await body_of(answer)
        assert (answer.status_code, ended["status"], ended["usage_pending"]) == (200, "cancelled", False)
        assert ended["finished_at"] is not None
        await database_step(assert_money, rows.user, used=6)
        assert await body_of(await ask("POST", f"{job.pk}/cancel", rows)) == ended
    finally:
        await close_async_pool()


async def until_row(job: CompletionJob, **is_so: Any) -> None:
    """Wait until the Job's row is so."""
    async with asyncio.timeout(20):
        while not await database_step(CompletionJob.objects.filter(pk=job.pk, **is_so).exists):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_cancel_whose_client_leaves_is_done_all_the_same() -> None:
    try:
        rows = await database_step(make_rows)
        await database_step(submit, rows.user, rows.key, rows.model)
        job = await database_step(claimed, rows.model)
        asking = asyncio.create_task(ask("POST", f"{job.pk}/cancel", rows))
        await until_row(job, cancel_requested_at__isnull=False)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until_row(job, status="cancelled")
    finally:
        await close_async_pool()


def test_a_submit_is_one_transaction_of_two_statements(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    once = idempotent_request(user_id=user.pk, key="k", route="r", body={})
    with CaptureQueriesContext(connection) as queries:
        submit(user, key, model, request=once)
    # BEGIN, the User's lock, all else, COMMIT.
    assert len(queries) == 4, [entry["sql"] for entry in queries.captured_queries]


def test_the_reference_has_the_routes() -> None:
    document = json.loads(openapi_document())
    paths, job = document["paths"], document["components"]["schemas"]["CompletionJob"]
    assert set(job["properties"]) == KEYS
    assert {"200", "202"} <= set(paths["/v1/completion-jobs"]["post"]["responses"])
    names = {parameter["name"] for parameter in paths["/v1/completion-jobs"]["post"]["parameters"]}
    assert "Idempotency-Key" in names
    for path in ("", "/result"):
        assert "get" in paths["/v1/completion-jobs/{job_id}" + path]
    assert "post" in paths["/v1/completion-jobs/{job_id}/cancel"]
