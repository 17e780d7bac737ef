"""Submits from async views: one transaction in one round trip, whole or not at all, whoever else is at it."""

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test import AsyncClient

from accounts.models import User
from accounts.services import create_key
from acsinfra.core import db
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import idempotent_request
from acsinfra.core.ids import new_uuid7
from acsinfra.models import IdempotencyKey
from budgets.limits import set_monthly_tokens
from inference.models import BaseModel
from jobs.models import CompletionJob, JobRequest
from jobs.submitting import submit_job_async
from tests.budgets.test_holds_async import Statements
from tests.harvest.conftest import make_model, make_user
from tests.jobs.conftest import HOLD_TOKENS, work_for

pytestmark = pytest.mark.django_db(transaction=True)

BODY: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 10}


class Submitter:
    """A User with a key, and a model."""

    def __init__(self) -> None:
        self.user = make_user("ada")
        self.key, self.text = create_key(user=self.user, name="key")
        self.model = make_model()

    async def submit(self, once: str | None = None, body: dict[str, Any] | None = None) -> CompletionJob:
        """Put a Job in line, under the Idempotency-Key `once` or one of its own."""
        job_id = new_uuid7()
        request = idempotent_request(user_id=self.user.pk, key=once or job_id.hex, route="r", body=body or {})
        return await submit_job_async(
            user=self.user,
            api_key=self.key,
            base_model_id=self.model.pk,
            job_id=job_id,
            work=work_for(job_id, self.model),
            request=request,
        )

    async def post(self, body: dict[str, Any], once: str) -> tuple[int, dict[str, Any]]:
        """Post `body` to the route; returns the status and the body of the answer."""
        headers = {"Authorization": f"Bearer {self.text}", "Idempotency-Key": once}
        answer: Any = await AsyncClient().post(
            "/v1/completion-jobs", json.dumps(body), content_type="application/json", headers=headers
        )
        return answer.status_code, json.loads(answer.content)


@pytest.fixture
async def submitter(transactional_db: None) -> AsyncIterator[Submitter]:
    """Return rows to submit with; the pool of the test's loop ends with it."""
    yield await db.database_step(Submitter)
    await db.close_async_pool()


async def codes_at_once(submits: list[Any]) -> Counter[str]:
    outcomes = await asyncio.gather(*submits, return_exceptions=True)
    return Counter(found.code.value if isinstance(found, ApiError) else type(found).__name__ for found in outcomes)


async def rows() -> tuple[int, int, int]:
    """How many Jobs there are, requests of Jobs, and keys."""
    counts = [await db.database_step(model.objects.count) for model in (CompletionJob, JobRequest, IdempotencyKey)]
    return counts[0], counts[1], counts[2]


async def test_a_submit_is_two_statements_in_one_transaction(
    submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitter.submit()
    statements = Statements(monkeypatch)
    made = await submitter.submit()
    assert [sent.split()[0] for sent in statements.sent] == ["BEGIN", "SELECT", "WITH", "COMMIT"]
    stored = await db.database_step(CompletionJob.objects.get, pk=made.pk)
    fields = [field.attname for field in CompletionJob._meta.concrete_fields if field.attname != "waiting_since"]
    assert [getattr(made, name) for name in fields] == [getattr(stored, name) for name in fields]
    assert await rows() == (2, 2, 2)


async def test_many_at_once_make_one_job_of_a_key_and_no_more_than_there_are_places(submitter: Submitter) -> None:
    assert await codes_at_once([submitter.submit("k") for _ in range(32)]) == {"CompletionJob": 32}
    submitter.user.jobs_unfinished = 5
    codes = await codes_at_once([submitter.submit() for _ in range(24)])
    assert codes == {"CompletionJob": 4, "job_capacity": 20}
    assert await rows() == (5, 5, 5)


async def test_what_stands_in_the_way_is_said_and_a_refusal_leaves_nothing(submitter: Submitter) -> None:
    async def code(submit: Any) -> ErrorCode:
        with pytest.raises(ApiError) as refused:
            await submit
        return refused.value.code

    await db.database_step(set_monthly_tokens, user=submitter.user, monthly_tokens=HOLD_TOKENS - 1)
    assert await code(submitter.submit()) is ErrorCode.BUDGET_EXCEEDED
    await db.database_step(set_monthly_tokens, user=submitter.user, monthly_tokens=HOLD_TOKENS)
    await submitter.submit("k", {"a": 1})
    assert await code(submitter.submit("k", {"a": 2})) is ErrorCode.IDEMPOTENCY_CONFLICT
    await db.database_step(CompletionJob.objects.all().delete)
    await db.database_step(BaseModel.objects.all().delete)
    assert await code(submitter.submit()) is ErrorCode.MODEL_NOT_FOUND
    await db.database_step(User.objects.all().delete)
    assert await code(submitter.submit()) is ErrorCode.INVALID_API_KEY
    assert await rows() == (0, 0, 0)


async def test_a_retry_gets_its_job_whatever_it_would_meet_today(submitter: Submitter) -> None:
    status, first = await submitter.post(BODY, "k")
    assert status == 202
    await db.database_step(set_monthly_tokens, user=submitter.user, monthly_tokens=0)
    assert await submitter.post(BODY, "k") == (200, first)
    await db.database_step(BaseModel.objects.update, is_enabled=False)
    async with asyncio.timeout(60):
        while (await submitter.post(BODY, uuid.uuid4().hex))[1]["error"]["code"] != "model_not_found":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await submitter.post(BODY, "k") == (200, first)
    # Another request, and one that would be refused for its fields.
    for body in ({**BODY, "max_tokens": 11}, {**BODY, "max_tokens": -1}):
        status, refusal = await submitter.post(body, "k")
        assert (status, refusal["error"]["code"]) == (409, "idempotency_conflict")
    assert await rows() == (1, 1, 1)


async def test_a_client_that_leaves_in_the_middle_leaves_a_whole_job_or_none(submitter: Submitter) -> None:
    await submitter.submit()
    chance = random.Random(4)
    for _ in range(60):
        submit = asyncio.create_task(submitter.submit())
        await asyncio.sleep(chance.random() * 0.01)
        submit.cancel()
        await asyncio.wait([submit])
    jobs, requests, keys = await rows()
    assert jobs == requests == keys
    # Every connection that a submit was cut off on is as good as before.
    assert await codes_at_once([submitter.submit() for _ in range(16)]) == {"CompletionJob": 16}
    assert await rows() == (jobs + 16, jobs + 16, jobs + 16)
