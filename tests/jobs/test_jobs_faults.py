"""Jobs whose worker, engine or API dies under them: each ends right, is charged once, and is never lost.

One stack with short leases, its tests in order: each leaves it as it found it, until the last stops the worker.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import conftest
from tests.inference.test_completions_way import engine_process
from tests.jobs.jobs import LONG, SHORT, money, read, result_of, submit, wait_for
from tests.stack import Stack, StackUser

SOME = LONG | {"prompt": ["The capital"] * 8, "max_tokens": 400}
SWITCH = """
from inference.models import BaseModel
from inference.services import set_enabled
set_enabled(model=BaseModel.objects.get(name="tiny"), enabled=enabled)
"""
TOKENS_OF_SOME = 8 * (3 + 400)
ROWS = """
from jobs.models import CompletionJob
jobs = CompletionJob.objects.filter(user_id=user)
result = [[str(job.pk), job.counted_tokens, job.tries, job.status] for job in jobs]
"""


@pytest.fixture(scope="module")
def fragile(tiny_model: Path) -> Iterator[Stack]:
    """Return a stack of its own with short leases; all but the runner run."""
    broker_url = conftest.VALKEY.url.removesuffix("/0") + "/3"
    stack = Stack(
        conftest.SUPERVISOR, postgres=conftest.POSTGRES, broker_url=broker_url, tiny_model=tiny_model, name="jobs"
    )
    stack.env |= {"LEASE_SECONDS": "3", "LEASE_RENEWAL_SECONDS": "0.5"}
    # The row of a worker that was killed must not pass for the next one's.
    stack.env |= {"HEARTBEAT_SECONDS": "1", "ENGINE_SILENT_AFTER_SECONDS": "5"}
    stack.start("api", "inference", "scheduler")
    yield stack
    stack.close()


@pytest.fixture
def user(fragile: Stack) -> StackUser:
    return fragile.new_user()


@pytest.fixture
def client(fragile: Stack, user: StackUser) -> Iterator[httpx.Client]:
    with fragile.client(user) as client:
        yield client


@contextmanager
def time_limit(stack: Stack, seconds: str) -> Iterator[None]:
    """Run the block with a worker of this time limit. The others have the product's, which no slow machine reaches."""
    stack.stop("inference")
    stack.env["ENGINE_TIME_LIMIT"] = seconds
    try:
        stack.start("inference")
        yield
    finally:
        stack.stop("inference")
        del stack.env["ENGINE_TIME_LIMIT"]
        stack.start("inference")


def start_some(client: httpx.Client, body: dict[str, Any] = SOME, count: int = 3) -> list[dict[str, Any]]:
    """Submit Jobs and return them once all run."""
    jobs = [submit(client, body) for _ in range(count)]
    return [wait_for(client, job["id"], until=("running",)) for job in jobs]


def assert_each_was_charged_once(stack: Stack, user: StackUser, jobs: list[dict[str, Any]], tokens: int) -> None:
    found = money(stack, user)
    assert found["charges"] == {job["id"]: tokens for job in jobs}
    assert (found["used"], found["held"], found["live"], found["wrong"]) == (tokens * len(jobs), 0, 0, 0)


def test_jobs_of_a_worker_that_is_killed_run_again_and_are_charged_once(
    fragile: Stack, client: httpx.Client, user: StackUser
) -> None:
    started = start_some(client)
    fragile.kill("inference")
    # The API goes too: nothing that it had in mind is needed.
    fragile.kill("api")
    fragile.start("api")
    back = [wait_for(client, job["id"], until=("queued",)) for job in started]
    assert all(job["usage_pending"] for job in back)
    assert [job["started_at"] for job in back] == [job["started_at"] for job in started]
    fragile.start("inference")
    results = [result_of(client, job["id"]) for job in started]
    assert [result.status_code for result in results] == [200] * 3
    assert {result.json()["usage"]["total_tokens"] for result in results} == {TOKENS_OF_SOME}
    assert [read(client, job["id"])["started_at"] for job in started] == [job["started_at"] for job in started]
    assert_each_was_charged_once(fragile, user, started, TOKENS_OF_SOME)


def test_jobs_of_an_engine_that_dies_run_again_and_those_in_line_lose_no_try(
    fragile: Stack, client: httpx.Client, user: StackUser
) -> None:
    # The first has every place that Jobs may have.
    first = submit(client, LONG)
    deadline = time.monotonic() + 30
    while not any(counted for _, counted, _, _ in fragile.django(ROWS, user=user.id)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    in_line = start_some(client, count=2)
    engine_process(fragile).kill()
    assert [result_of(client, job["id"]).status_code for job in (first, *in_line)] == [200] * 3
    tries = {job_id: tries for job_id, _, tries, _ in fragile.django(ROWS, user=user.id)}
    assert tries == {first["id"]: 1} | dict.fromkeys((job["id"] for job in in_line), 0)
    found = money(fragile, user)
    charges = {first["id"]: 60 * (3 + 480)} | dict.fromkeys((job["id"] for job in in_line), TOKENS_OF_SOME)
    assert found["charges"] == charges
    assert (found["used"], found["held"], found["live"], found["wrong"]) == (sum(charges.values()), 0, 0, 0)


@pytest.mark.long
def test_jobs_whose_engine_died_twice_end_right_at_their_last_try(
    fragile: Stack, client: httpx.Client, user: StackUser
) -> None:
    jobs = [submit(client, SOME) for _ in range(3)]
    for deaths in range(2):
        deadline = time.monotonic() + 60
        while not all(row[2:] == [deaths, "running"] for row in fragile.django(ROWS, user=user.id)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # All are in the engine by then.
        time.sleep(0.3)
        engine_process(fragile).kill()
    assert [result_of(client, job["id"]).status_code for job in jobs] == [200] * 3
    assert [tries for _, _, tries, _ in fragile.django(ROWS, user=user.id)] == [2] * 3
    assert_each_was_charged_once(fragile, user, jobs, TOKENS_OF_SOME)


@pytest.mark.long
def test_jobs_that_wait_for_each_other_in_the_engine_are_not_late(
    fragile: Stack, client: httpx.Client, user: StackUser
) -> None:
    # Together they take longer than the time limit, which begins for each with its first place.
    with time_limit(fragile, "20"):
        jobs = [submit(client, LONG | {"max_tokens": 300}) for _ in range(8)]
        assert [result_of(client, job["id"]).status_code for job in jobs] == [200] * len(jobs)
    assert_each_was_charged_once(fragile, user, jobs, 60 * (3 + 300))


@pytest.mark.long
def test_past_the_time_limit_the_result_is_a_timeout(fragile: Stack, client: httpx.Client, user: StackUser) -> None:
    with time_limit(fragile, "1.5"):
        job = submit(client, LONG)
        result = result_of(client, job["id"])
    assert result.status_code == 504
    assert result.json()["error"]["code"] == "engine_timeout"
    assert result.json()["request_id"].startswith("req_job_")
    found = money(fragile, user)
    # What the engine generated until then is charged.
    assert 0 < found["charges"][job["id"]] < 60 * (3 + 480)
    assert (found["live"], found["wrong"]) == (0, 0)


def test_a_job_of_a_model_that_is_switched_off_while_it_waits_fails(fragile: Stack, client: httpx.Client) -> None:
    user = fragile.new_user(jobs_running=0)
    with fragile.client(user) as client:
        job = submit(client, SHORT)
        fragile.django(SWITCH, enabled=False)
        try:
            result = result_of(client, job["id"])
        finally:
            fragile.django(SWITCH, enabled=True)
    assert (result.status_code, result.json()["error"]["code"]) == (400, "model_not_found")
    assert result.json()["request_id"] == job["request_id"]


def test_a_worker_that_is_stopped_puts_back_what_it_cannot_finish(
    fragile: Stack, client: httpx.Client, user: StackUser
) -> None:
    started = start_some(client, LONG | {"prompt": ["The capital"] * 66}, count=8)
    process = fragile.children["inference"].process
    # As systemd and a terminal do it: to every process of the group.
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert process.returncode == 0, fragile.log("inference")[-3000:]
    now = [read(client, job["id"]) for job in started]
    assert {job["status"] for job in now} <= {"queued", "succeeded"}
    waiting = [job for job in now if job["status"] == "queued"]
    assert waiting
    rows = "from jobs.models import CompletionJob; result = list(CompletionJob.objects.filter(user_id=user, status="
    tries = fragile.django(rows + "'queued').values_list('tries', flat=True))", user=user.id)
    assert set(tries) == {0}
    for job in waiting:
        ended = client.post(f"completion-jobs/{job['id']}/cancel").json()
        assert (ended["status"], ended["usage_pending"]) == ("cancelled", False)
    found = money(fragile, user)
    assert (found["held"], found["live"], found["wrong"]) == (0, 0, 0)
