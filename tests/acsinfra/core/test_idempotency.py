"""Idempotency-Keys: one key, one work, whoever races for it and whatever dies."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import RequestFactory
from django.utils import timezone
from rest_framework.request import Request

from acsinfra.core import db, idempotency
from acsinfra.core.db import _take_connection, close_async_pool
from acsinfra.core.errors import ApiError
from acsinfra.core.idempotency import IdempotentRequest, InProgress, RecordedAnswer, SweptKeys
from acsinfra.core.storage import get_storage
from acsinfra.models import IdempotencyKey
from tests.live_server import make_user

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

ROUTE = "POST /v1/completion-jobs"
ANSWER = RecordedAnswer(200, {"Content-Type": "application/json"}, b'{"id": 1}')


@pytest.fixture
async def pool() -> AsyncIterator[None]:
    yield
    await close_async_pool()


def asks(key: str = "k1", *, user_id: int | None = None, route: str = ROUTE, **body: Any) -> IdempotentRequest:
    """Return a request of a User of its own, unless one is given."""
    return idempotency.idempotent_request(
        user_id=make_user().pk if user_id is None else user_id, key=key, route=route, body=body or {"model": "tiny"}
    )


def again(request: IdempotentRequest, **body: Any) -> IdempotentRequest:
    """Return another request of the same User with the same key."""
    return asks(request.key, user_id=request.user_id, **body)


def refusal_of(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str]:
    return error.value.status, error.value.code.value


# Reading


@pytest.mark.parametrize("key", ["k", "a b", "x" * 255, "3f0e-…-ü", "é" * 255])
def test_a_key_of_1_to_255_printable_characters_is_taken(key: str) -> None:
    sent = RequestFactory().post("/", headers={"Idempotency-Key": key.encode().decode("latin-1")})
    assert idempotency.read_idempotency_key(Request(sent), required=True) == key


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "a\x7f", "é" * 256])
@pytest.mark.parametrize("required", [True, False])
def test_any_other_key_is_refused(key: str, required: bool) -> None:
    sent = RequestFactory().post("/", headers={"Idempotency-Key": key.encode().decode("latin-1")})
    with pytest.raises(ApiError) as error:
        idempotency.read_idempotency_key(Request(sent), required=required)
    assert (refusal_of(error), error.value.param) == ((400, "invalid_request"), "Idempotency-Key")


def test_a_missing_key_is_refused_only_where_it_is_required() -> None:
    request = Request(RequestFactory().post("/"))
    assert idempotency.read_idempotency_key(request, required=False) is None
    with pytest.raises(ApiError) as error:
        idempotency.read_idempotency_key(request, required=True)
    assert (refusal_of(error), error.value.param) == ((400, "invalid_request"), "Idempotency-Key")


def test_a_fingerprint_is_of_the_route_and_the_value() -> None:
    def fingerprint(body: dict[str, Any], route: str = ROUTE) -> bytes:
        return idempotency.idempotent_request(user_id=1, key="k", route=route, body=body).fingerprint

    first = fingerprint({"a": 1, "b": {"c": [1, "é\ud800"], "d": None}})
    assert len(first) == 32
    assert fingerprint({"b": {"d": None, "c": [1, "é\ud800"]}, "a": 1}) == first
    assert fingerprint({"a": 1}, "POST /v1/harvest") != fingerprint({"a": 1})
    values: list[Any] = [1, 1.0, True, "1", None, [], [1, 2], [2, 1], {}, 10**4000, float("inf")]
    assert len({fingerprint({"a": value}) for value in values}) == len(values)
    assert fingerprint({}) != fingerprint({"a": None})


# Jobs and Harvest jobs


def test_a_key_names_the_work_that_it_made() -> None:
    request, work = asks(), uuid.uuid4()
    assert idempotency.find_work(request) is None
    with transaction.atomic():
        assert idempotency.bind_work(request, work) == work
    assert idempotency.find_work(again(request)) == work
    assert idempotency.bind_work(again(request), uuid.uuid4()) == work


@committed
async def test_the_async_look_finds_the_same(pool: None) -> None:
    request, work = await db.database_step(asks), uuid.uuid4()
    assert await idempotency.find_work_async(request) is None
    await db.database_step(idempotency.bind_work, request, work)
    assert await idempotency.find_work_async(request) == work


def test_another_request_with_the_key_conflicts_and_clients_are_told_not_to_retry() -> None:
    request = asks()
    idempotency.bind_work(request, uuid.uuid4())
    for other in (again(request, model="other"), asks(request.key, user_id=request.user_id, route="POST /v1/harvest")):
        with pytest.raises(ApiError) as error:
            idempotency.find_work(other)
        assert refusal_of(error) == (409, "idempotency_conflict")
        assert error.value.headers == {"x-should-retry": "false"}
        with pytest.raises(ApiError) as error:
            idempotency.bind_work(other, uuid.uuid4())
        assert refusal_of(error) == (409, "idempotency_conflict")


def test_keys_of_two_users_are_two_keys() -> None:
    first, second = asks("same"), asks("same")
    works = [idempotency.bind_work(request, uuid.uuid4()) for request in (first, second)]
    assert works[0] != works[1]


@committed
def test_a_rolled_back_work_leaves_its_key_unused() -> None:
    request = asks()
    with transaction.atomic():
        idempotency.bind_work(request, uuid.uuid4())
        transaction.set_rollback(True)
    assert idempotency.find_work(request) is None


@committed
@pytest.mark.parametrize("commits", [True, False])
def test_a_second_connection_waits_for_the_first_s_end(commits: bool) -> None:
    request = asks()
    works = [uuid.uuid4(), uuid.uuid4()]
    bound: list[uuid.UUID] = []
    is_bound, may_end = threading.Event(), threading.Event()

    def first() -> None:
        try:
            with transaction.atomic():
                idempotency.bind_work(request, works[0])
                is_bound.set()
                may_end.wait(60)
                transaction.set_rollback(not commits)
        finally:
            connection.close()

    def second() -> None:
        try:
            with transaction.atomic():
                bound.append(idempotency.bind_work(request, works[1]))
        finally:
            connection.close()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert is_bound.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert not bound
    may_end.set()
    for thread in threads:
        thread.join(60)
    expected = works[0] if commits else works[1]
    assert bound == [expected]
    assert idempotency.find_work(request) == expected


@committed
def test_32_connections_at_once_bind_one_work() -> None:
    request = asks()
    bound: list[uuid.UUID] = []
    barrier = threading.Barrier(32)

    def bind() -> None:
        barrier.wait()
        try:
            # As the API's steps do: 32 take turns at 8 connections, for as long as a busy machine needs.
            _take_connection()
            with transaction.atomic():
                bound.append(idempotency.bind_work(request, uuid.uuid4()))
        finally:
            connection.close()

    threads = [threading.Thread(target=bind) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bound) == 32
    assert set(bound) == {idempotency.find_work(request)}


# Answers


@committed
async def test_an_answer_is_kept_for_every_retry(pool: None) -> None:
    request = await db.database_step(asks)
    assert await idempotency.find_answer(request) is None
    assert await idempotency.begin_work(request, holder="api-1", reference="req_1") is None
    running = InProgress("api-1", "req_1")
    assert await idempotency.find_answer(request) == running
    assert await idempotency.begin_work(request, holder="api-2", reference="req_2") == running
    await idempotency.record_answer(request, reference="req_1", answer=ANSWER)
    assert await idempotency.find_answer(request) == ANSWER
    assert await idempotency.begin_work(request, holder="api-2", reference="req_2") == ANSWER
    # Nothing changes it any more.
    await idempotency.record_answer(request, reference="req_1", answer=RecordedAnswer(502, {}, b"later"))
    await idempotency.forget_work(request, reference="req_1")
    assert await idempotency.find_answer(request) == ANSWER


@committed
async def test_a_large_answer_is_named_by_its_file(pool: None) -> None:
    request = await db.database_step(asks)
    await idempotency.begin_work(request, holder="api-1", reference="req_1")
    answer = RecordedAnswer(200, {"Content-Type": "application/json"}, file=idempotency.answer_file())
    await idempotency.record_answer(request, reference="req_1", answer=answer)
    assert await idempotency.find_answer(request) == answer


@committed
async def test_a_forgotten_request_leaves_its_key_unused(pool: None) -> None:
    request = await db.database_step(asks)
    await idempotency.begin_work(request, holder="api-1", reference="req_1")
    await idempotency.forget_work(request, reference="req_0")
    assert await idempotency.find_answer(request) == InProgress("api-1", "req_1")
    await idempotency.forget_work(request, reference="req_1")
    assert await idempotency.find_answer(request) is None
    other = again(request, model="other")
    assert await idempotency.begin_work(other, holder="api-1", reference="req_2") is None


@committed
async def test_32_coroutines_at_once_begin_one_work(pool: None) -> None:
    request = await db.database_step(asks)
    begun = await asyncio.gather(
        *(idempotency.begin_work(request, holder="api", reference=f"req_{n}") for n in range(32))
    )
    assert begun.count(None) == 1
    assert {outcome for outcome in begun if outcome} == {InProgress("api", f"req_{begun.index(None)}")}


@committed
async def test_a_user_who_was_deleted_meanwhile_has_no_key(pool: None) -> None:
    request = asks(user_id=2**40)
    with pytest.raises(ApiError) as error:
        await idempotency.begin_work(request, holder="api-1", reference="req_1")
    assert refusal_of(error) == (401, "invalid_api_key")


# Time


def test_a_key_is_unused_again_after_its_time_swept_or_not() -> None:
    request = asks()
    idempotency.bind_work(request, uuid.uuid4())
    IdempotencyKey.objects.update(created_at=timezone.now() - timedelta(hours=24, seconds=1))
    other, work = again(request, model="other"), uuid.uuid4()
    assert idempotency.find_work(other) is None
    assert idempotency.bind_work(other, work) == work
    assert idempotency.find_work(other) == work
    assert idempotency.delete_old_keys() == 0
    IdempotencyKey.objects.update(created_at=timezone.now() - timedelta(hours=24, seconds=1))
    kept = asks()
    idempotency.bind_work(kept, work)
    assert [idempotency.delete_old_keys() for _ in range(2)] == [1, 0]
    assert idempotency.find_work(kept) == work


def test_files_are_deleted_when_no_key_can_name_them_any_more() -> None:
    storage = get_storage()
    today = datetime.now(UTC).date()
    file = idempotency.answer_file()
    storage.write(file, b"answer")
    idempotency.delete_old_files(today=today + timedelta(days=2))
    assert storage.read(file) == b"answer"
    idempotency.delete_old_files(today=today + timedelta(days=3))
    assert storage.size(file) is None
    idempotency.delete_old_files(today=date(2040, 1, 1))


# Holders that died


@committed
def test_what_a_dead_holder_left_in_progress_ends() -> None:
    requests = {name: asks(name) for name in ("charged", "untouched", "unsettled", "living", "job")}

    async def begin() -> None:
        for name, request in requests.items():
            if name != "job":
                holder = "api-living" if name == "living" else "api-dead"
                await idempotency.begin_work(request, holder=holder, reference=name)
        await close_async_pool()

    async def look() -> dict[str, Any]:
        found = {name: await idempotency.find_answer(request) for name, request in requests.items()}
        await close_async_pool()
        return found

    asyncio.run(begin())
    work = idempotency.bind_work(requests["job"], uuid.uuid4())
    error = RecordedAnswer(502, {"Content-Type": "application/json"}, b"{}")
    outcomes = {"charged": error, "untouched": None, "unsettled": InProgress("api-dead", "unsettled")}
    swept = [
        idempotency.end_abandoned_keys(
            find_living=lambda holders: {holder for holder in holders if holder == "api-living"},
            outcome=lambda reference: outcomes[reference],
        )
        for _ in range(2)
    ]
    assert swept == [SweptKeys(answered=1, freed=1), SweptKeys()]
    found = asyncio.run(look())
    assert found["charged"] == error
    assert found["untouched"] is None
    assert found["unsettled"] == InProgress("api-dead", "unsettled")
    assert found["living"] == InProgress("api-living", "living")
    assert idempotency.find_work(requests["job"]) == work


# The database itself


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 200},
        {"body": b"x"},
        {"holder": "api-1"},
        {"work_id": None},
        {"work_id": None, "holder": "api-1"},
        {"work_id": None, "holder": "api-1", "reference": "r", "status": 200},
        {"work_id": None, "holder": "api-1", "reference": "r", "status": 200, "body": b"x", "file": "f"},
        {"work_id": None, "holder": "api-1", "reference": "r", "body": b"x"},
    ],
)
def test_a_row_is_a_work_or_in_progress_or_an_answer(changes: dict[str, Any]) -> None:
    idempotency.bind_work(asks(), uuid.uuid4())
    with pytest.raises(IntegrityError, match="acsinfra_idempotency_legal_state"):
        IdempotencyKey.objects.update(**changes)
