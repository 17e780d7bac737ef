"""The routes of Harvest jobs over HTTP: who sees what, waiting, lists, and the answers that are errors."""

import asyncio
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from pytest_django import Settings
from redis import Redis

from accounts.models import ApiKey, User
from acsinfra.core.courier import close_shared_courier, shared_courier
from budgets.limits import set_monthly_tokens
from budgets.models import SpendLimit
from budgets.spend import forget_spending
from harvest import services, waiting
from harvest.models import HarvestJob
from inference import selectors
from inference.models import BaseModel, Engine
from inference.services import register_engine
from tests.harvest.conftest import OWNER, claim, error, held, plan_for, submit
from tests.inference.tensor_json import assert_named, tensor_json, wrong_tensors
from tests.live_server import LiveServer, make_key

pytestmark = pytest.mark.django_db(transaction=True)
NOBODY = str(uuid.UUID(int=7))


@pytest.fixture
def job(tiny: BaseModel, key_and_text: tuple[ApiKey, str]) -> HarvestJob:
    key = key_and_text[0]
    return services.submit_harvest(user=key.user, api_key=key, plan=plan_for(tiny))


def test_what_waits_is_held_and_what_does_not_fit_is_refused(
    client: httpx.Client, key_and_text: tuple[ApiKey, str]
) -> None:
    set_monthly_tokens(user=key_and_text[0].user, monthly_tokens=11)
    job = submit(client).json()
    assert (job["reserved_tokens"], held(client)) == (6, 6)
    refused = submit(client)
    assert error(refused) == (429, "budget_exceeded", None)
    assert refused.headers["x-should-retry"] == "false"
    assert "Retry-After" not in refused.headers
    client.delete(f"/v1/harvest/{job['job_id']}")
    assert held(client) == 0
    assert submit(client).status_code == 202


def test_past_the_spend_limit_no_new_job_is_taken_and_reading_goes_on(client: httpx.Client, job: HarvestJob) -> None:
    SpendLimit.objects.create(is_paused=True, pause_ends_at=Now() + timedelta(seconds=100))
    forget_spending()
    refused = submit(client)
    assert error(refused) == (429, "spend_cap", None)
    assert 90 < int(refused.headers["Retry-After"]) <= 100
    # The fields and the model come first.
    assert error(submit(client, layers=[9])) == (400, "invalid_request", "layers.0")
    assert client.get(f"/v1/harvest/{job.pk}").status_code == client.get("/v1/harvest").status_code == 200
    SpendLimit.objects.update(pause_ends_at=None)
    forget_spending()
    refused = submit(client)
    assert error(refused) == (429, "spend_cap", None)
    assert refused.headers["x-should-retry"] == "false"
    assert client.delete(f"/v1/harvest/{job.pk}").json()["status"] == "cancelled"
    SpendLimit.objects.update(is_paused=False)
    forget_spending()
    assert submit(client).status_code == 202


def test_directions_that_are_refused_name_their_bytes(client: httpx.Client) -> None:
    for tensor, key, counts in wrong_tensors():
        assert_named(submit(client, project_onto=tensor), param=f"project_onto.{key}", counts=counts)
    many = tensor_json(np.ones((65, 64), "<f4"), compression="none")
    assert_named(submit(client, project_onto=many), param="project_onto.shape", counts=("16,640", "16,640"))
    assert held(client) == 0


def test_a_submit_is_accepted_and_says_where_the_job_is(client: httpx.Client) -> None:
    answer = submit(client)
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/harvest/{answer.json()['job_id']}"
    assert answer.headers["X-Request-Id"].startswith("req_")
    assert client.get(answer.headers["Location"]).json() == answer.json()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "nothing"}, (400, "model_not_found", "model")),
        ({"prompts": []}, (400, "invalid_request", "prompts")),
        ({"layers": [4]}, (400, "invalid_request", "layers.0")),
        ({"prompts": ["a" * 4_000_001] * 2}, (400, "corpus_too_large", "prompts")),
        ({"typo": 1}, (400, "invalid_request", "typo")),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    assert error(submit(client, **fields)) == expected
    assert not HarvestJob.objects.exists()


def test_a_body_may_be_larger_here_than_elsewhere(client: httpx.Client, settings: Settings) -> None:
    settings.MONTHLY_TOKENS = 10_000_000
    # 12 MB of JSON, for 2,000,000 characters.
    body = b'{"model": "tiny", "prompts": ["' + b"\\u65e5" * 2_000_000 + b'"]}'
    assert client.post("/v1/harvest", content=body, headers={"Content-Type": "application/json"}).status_code == 202
    beyond = client.post("/v1/harvest", content=bytes(51 * 1024 * 1024), headers={"Content-Type": "application/json"})
    assert error(beyond) == (413, "request_too_large", None)


def test_a_model_that_is_off_or_takes_no_harvests(client: httpx.Client, tiny: BaseModel) -> None:
    BaseModel.objects.update(has_harvest=False)
    selectors._catalogue._fresh_until = 0.0
    assert error(submit(client)) == (400, "harvest_unsupported", "model")
    BaseModel.objects.update(is_enabled=False)
    selectors._catalogue._fresh_until = 0.0
    assert error(submit(client)) == (400, "model_not_found", "model")


def test_a_second_job_of_a_key_waits_for_the_first(server: LiveServer, tiny: BaseModel) -> None:
    _, text = make_key()
    with server.client(text) as client:
        first = submit(client).json()["job_id"]
        second = submit(client)
        assert error(second) == (429, "harvest_concurrency_exceeded", None)
        assert second.headers["Retry-After"] == "30"
        assert client.delete(f"/v1/harvest/{first}").json()["status"] == "cancelled"
        assert submit(client).status_code == 202


def test_two_submits_at_once_of_one_key_make_one_job(server: LiveServer, tiny: BaseModel) -> None:
    _, text = make_key()
    with server.client(text) as client, ThreadPoolExecutor(8) as threads:
        statuses = sorted(answer.status_code for answer in threads.map(lambda _: submit(client), range(8)))
    assert statuses == [202] + [429] * 7
    assert HarvestJob.objects.count() == 1


def test_without_a_runner_the_job_is_kept_as_failed(client: httpx.Client, settings: Settings) -> None:
    settings.RUNNER_GRACE /= 60
    Engine.objects.all().delete()
    began = time.monotonic()
    answer = submit(client)
    assert time.monotonic() - began >= settings.RUNNER_GRACE.total_seconds()
    assert error(answer) == (503, "harvest_unavailable", None)
    job = client.get(f"/v1/harvest/{answer.json()['job_id']}").json()
    assert (job["status"], job["tokens"]) == ("failed", 0)
    assert job["error"] == "No runner is there for tiny."
    assert held(client) == 0
    assert job["completed_at"] is not None


@pytest.mark.parametrize("leaves", ["before the submit's end", "after it"])
def test_without_a_runner_the_job_ends_also_when_its_client_has_left(
    server: LiveServer, key_and_text: tuple[ApiKey, str], settings: Settings, tiny: BaseModel, leaves: str
) -> None:
    settings.RUNNER_GRACE /= 15
    Engine.objects.all().delete()
    body = json.dumps({"model": "tiny", "prompts": ["Hello"]})
    head = f"POST /v1/harvest HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key_and_text[1]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    deadline = time.monotonic() + 60
    with server.connect() as client:
        if leaves == "after it":
            client.sendall((head + body).encode())
            while not HarvestJob.objects.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        else:
            # A submit locks the User first.
            with transaction.atomic():
                User.objects.select_for_update().get(pk=key_and_text[0].user_id)
                client.sendall((head + body).encode())
                while not is_waited_for():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                client.close()
                # The server sees it well before that.
                time.sleep(1)
    while not (job := HarvestJob.objects.first()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while job.status == HarvestJob.Status.PENDING and time.monotonic() < deadline:
        time.sleep(0.2)
        job.refresh_from_db()
    assert (job.status, job.tokens) == (HarvestJob.Status.FAILED, 0)


def is_waited_for() -> bool:
    """Whether another transaction waits for a lock of this one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted AND transactionid = pg_current_xact_id()::xid")
        return cursor.fetchone() is not None


def test_a_silent_runner_is_none(client: httpx.Client, settings: Settings) -> None:
    settings.RUNNER_GRACE /= 60
    Engine.objects.update(heartbeat_at=Now() - settings.ENGINE_SILENT_AFTER)
    assert error(submit(client)) == (503, "harvest_unavailable", None)


def test_a_runner_that_comes_within_the_grace_is_waited_for(client: httpx.Client, tiny: BaseModel) -> None:
    Engine.objects.all().delete()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(submit, client)
        time.sleep(1)
        assert not answer.done()
        register_engine(model=tiny, kind=Engine.Kind.RUNNER)
        assert answer.result().status_code == 202


def test_a_job_that_is_cancelled_while_it_waits_for_a_runner_is_answered_so(
    client: httpx.Client, settings: Settings
) -> None:
    settings.RUNNER_GRACE /= 15
    Engine.objects.all().delete()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(submit, client)
        while not (job := HarvestJob.objects.first()):
            assert not answer.done()
            time.sleep(0.02)
        cancelled = client.post(f"/v1/harvest/{job.pk}/cancel").json()
        assert (answer.result().status_code, answer.result().json()) == (202, cancelled)


@pytest.mark.parametrize("how", ["delete", "post"])
def test_a_cancel_answers_the_job(client: httpx.Client, job: HarvestJob, how: str) -> None:
    path = f"/v1/harvest/{job.pk}"

    def cancel() -> httpx.Response:
        return client.delete(path) if how == "delete" else client.post(f"{path}/cancel")

    answer = cancel()
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["tokens"]) == ("cancelled", 0)
    assert answer.json()["completed_at"] is not None
    assert cancel().json() == answer.json() == client.get(path).json()


def test_a_running_job_shows_its_progress_and_costs_all_when_cancelled(
    client: httpx.Client, job: HarvestJob, tiny: BaseModel
) -> None:
    claim(tiny)
    services.record_progress(job_id=job.pk, owner=OWNER, prompts=1, tokens=5, bytes_written=77)
    running = client.get(f"/v1/harvest/{job.pk}").json()
    assert running["status"] == "running"
    assert running["progress"] == {"prompts": 1, "tokens": 5, "bytes_written": 77}
    assert running["started_at"] is not None
    cancelled = client.delete(f"/v1/harvest/{job.pk}").json()
    assert (cancelled["status"], cancelled["tokens"]) == ("cancelled", 12)
    assert "progress" not in cancelled


def test_another_users_job_is_no_job(server: LiveServer, job: HarvestJob) -> None:
    _, stranger = make_key()
    with server.client(stranger) as client:
        for job_id in (str(job.pk), NOBODY):
            answers = [
                client.get(f"/v1/harvest/{job_id}"),
                client.get(f"/v1/harvest/{job_id}?wait=5"),
                client.delete(f"/v1/harvest/{job_id}"),
                client.post(f"/v1/harvest/{job_id}/cancel"),
            ]
            assert [error(answer) for answer in answers] == [(404, "not_found", None)] * 4
            assert len({answer.json()["error"]["message"] for answer in answers}) == 1
        assert client.get("/v1/harvest").json()["data"] == []
        assert error(client.get(f"/v1/harvest?after={job.pk}")) == (400, "invalid_request", "after")
    job.refresh_from_db()
    assert job.status == "pending"


@pytest.mark.parametrize("job_id", ["1", "x" * 36, f"{NOBODY}0", "%00", NOBODY.replace("-", "")])
def test_a_malformed_id_is_a_404(client: httpx.Client, job_id: str) -> None:
    assert error(client.get(f"/v1/harvest/{job_id}"))[:2] == (404, "not_found")


def test_another_key_of_the_same_user_sees_the_job(
    server: LiveServer, job: HarvestJob, key_and_text: tuple[ApiKey, str]
) -> None:
    _, text = make_key(key_and_text[0].user)
    with server.client(text) as client:
        assert client.get(f"/v1/harvest/{job.pk}").json()["job_id"] == str(job.pk)


# Lists


def test_a_list_goes_from_the_newest_back(client: httpx.Client) -> None:
    ids = [submit(client).json()["job_id"] for _ in range(5)][::-1]
    page = client.get("/v1/harvest?limit=2").json()
    assert (page["object"], page["has_more"]) == ("list", True)
    assert [job["job_id"] for job in page["data"]] == ids[:2]
    page = client.get(f"/v1/harvest?limit=2&after={ids[1]}").json()
    assert [job["job_id"] for job in page["data"]] == ids[2:4]
    page = client.get(f"/v1/harvest?limit=2&after={ids[3]}").json()
    assert ([job["job_id"] for job in page["data"]], page["has_more"]) == (ids[4:], False)
    whole = client.get("/v1/harvest").json()
    assert [job["job_id"] for job in whole["data"]] == ids
    assert whole["data"][0] == client.get(f"/v1/harvest/{ids[0]}").json()


def test_a_list_is_narrowed_by_status_and_model(client: httpx.Client) -> None:
    pending = submit(client).json()["job_id"]
    cancelled = submit(client).json()["job_id"]
    client.delete(f"/v1/harvest/{cancelled}")

    def ids(query: str) -> list[str]:
        return [job["job_id"] for job in client.get(f"/v1/harvest?{query}").json()["data"]]

    assert ids("status=cancelled") == [cancelled]
    assert ids("status=pending&model=tiny") == [pending]
    assert ids("model=other") == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=1.0", "limit"),
        ("limit=", "limit"),
        ("status=lost", "status"),
        ("model=%00", "model"),
        ("status=%00", "status"),
        ("other=a%00b", "other"),
        ("after=1", "after"),
        (f"after={NOBODY}", "after"),
    ],
)
def test_a_wrong_query_is_refused_by_name(client: httpx.Client, query: str, param: str) -> None:
    assert error(client.get(f"/v1/harvest?{query}")) == (400, "invalid_request", param)


# Waiting


def test_a_wait_ends_when_the_status_changes(client: httpx.Client, job: HarvestJob, tiny: BaseModel) -> None:
    for change, status in (
        (lambda: claim(tiny), "running"),
        (lambda: services.hand_back(job_id=job.pk, owner=OWNER), "pending"),
        (lambda: services.cancel_harvest(job_id=job.pk), "cancelled"),
    ):
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(client.get, f"/v1/harvest/{job.pk}?wait=20")
            until_waiting(1)
            assert not answer.done()
            change()
            changed = time.monotonic()
            assert answer.result().json()["status"] == status
            # Long before its seconds are over.
            assert time.monotonic() - changed < 10


def test_a_wait_ends_after_its_seconds(client: httpx.Client, job: HarvestJob) -> None:
    began = time.monotonic()
    answer = client.get(f"/v1/harvest/{job.pk}?wait=1")
    assert 1.0 <= time.monotonic() - began < 30
    assert answer.json()["status"] == "pending"
    assert "X-Acs-Longpoll" not in answer.headers


def test_there_is_nothing_to_wait_for_after_the_end(client: httpx.Client, job: HarvestJob) -> None:
    services.cancel_harvest(job_id=job.pk)
    began = time.monotonic()
    assert client.get(f"/v1/harvest/{job.pk}?wait=30").json()["status"] == "cancelled"
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("wait", ["-1", "61", "1.5", "", "x", "1e1", "٣"])
def test_a_wait_is_whole_seconds_from_0_to_60(client: httpx.Client, job: HarvestJob, wait: str) -> None:
    answer = client.get(f"/v1/harvest/{job.pk}", params={"wait": wait})
    assert error(answer) == (400, "invalid_request", "wait")


def test_four_waits_of_a_key_at_once_and_a_fifth_is_declined(
    client: httpx.Client, server: LiveServer, job: HarvestJob, key_and_text: tuple[ApiKey, str]
) -> None:
    path = f"/v1/harvest/{job.pk}?wait=20"
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(client.get, path) for _ in range(4)]
        until_waiting(4)
        began = time.monotonic()
        fifth = client.get(path)
        assert time.monotonic() - began < 10
        assert fifth.status_code == 200
        assert (fifth.headers["X-Acs-Longpoll"], fifth.headers["Retry-After"]) == ("declined", "3")
        assert fifth.json()["status"] == "pending"
        _, other_key = make_key(key_and_text[0].user)
        with server.client(other_key) as other:
            assert "X-Acs-Longpoll" not in other.get(f"/v1/harvest/{job.pk}?wait=1").headers
        services.cancel_harvest(job_id=job.pk)
        for answer in answers:
            assert "X-Acs-Longpoll" not in answer.result().headers
            assert answer.result().json()["status"] == "cancelled"


def until_waiting(requests: int) -> None:
    """Return once so many requests wait in the server for a job."""
    deadline = time.monotonic() + 30
    while sum(len(watch._waiting) for watch in waiting._watches.values()) < requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_place_that_was_asked_for_as_its_client_left_comes_back(looks: Redis) -> None:
    name = "acs:harvest-waits:leaves"

    async def wait() -> None:
        async with waiting.take_place("leaves", seconds=60, at_once=1):
            await asyncio.sleep(60)

    await shared_courier().ask("PING")
    looks.client_pause(200, all=True)
    leaving = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await shared_courier().ask("ZCARD", name) == 0
    await close_shared_courier()


def test_a_short_wait_does_not_end_the_places_of_longer_ones(
    client: httpx.Client, job: HarvestJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "GRACE_SECONDS", 1)
    with ThreadPoolExecutor(3) as threads:
        long_ones = [threads.submit(client.get, f"/v1/harvest/{job.pk}?wait=40") for _ in range(3)]
        until_waiting(3)
        client.get(f"/v1/harvest/{job.pk}?wait=1")
        # Past the short wait's own expiry.
        time.sleep(waiting.GRACE_SECONDS + 1)
        with ThreadPoolExecutor(2) as more:
            answers = list(more.map(client.get, [f"/v1/harvest/{job.pk}?wait=3"] * 2))
        services.cancel_harvest(job_id=job.pk)
        assert all("X-Acs-Longpoll" not in answer.result().headers for answer in long_ones)
    assert sorted(answer.headers.get("X-Acs-Longpoll", "") for answer in answers) == ["", "declined"]


def test_a_place_to_wait_comes_back_when_its_client_goes_away(
    client: httpx.Client, server: LiveServer, job: HarvestJob, key_and_text: tuple[ApiKey, str]
) -> None:
    path, patience = f"/v1/harvest/{job.pk}?wait=30", httpx.Timeout(30, read=0.5)
    for _ in range(6):
        with pytest.raises(httpx.ReadTimeout), server.client(key_and_text[1], timeout=patience) as impatient:
            impatient.get(path)
    deadline = time.monotonic() + 20
    while sum(len(watch._waiting) for watch in waiting._watches.values()) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert "X-Acs-Longpoll" not in client.get(f"/v1/harvest/{job.pk}?wait=1").headers


def test_a_hundred_waits_cost_no_thread_each(
    server: LiveServer, job: HarvestJob, key_and_text: tuple[ApiKey, str], settings: Settings
) -> None:
    settings.HARVEST_WAITS_AT_ONCE = 1_000
    with server.client(key_and_text[1], limits=httpx.Limits(max_connections=200), timeout=120) as client:
        client.get(f"/v1/harvest/{job.pk}")
        with ThreadPoolExecutor(100) as threads:
            answers = [threads.submit(client.get, f"/v1/harvest/{job.pk}?wait=60") for _ in range(100)]
            until_waiting(100)
            own = [thread for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")]
            assert not any(answer.done() for answer in answers)
            assert len(own) < 40
            services.cancel_harvest(job_id=job.pk)
            assert {answer.result().json()["status"] for answer in answers} == {"cancelled"}
