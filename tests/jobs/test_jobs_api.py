"""`/v1/completion-jobs` on the real processes."""

import base64
import re
import struct
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import httpx
import psutil
import pytest

from tests.inference.tensor_json import assert_named, wrong_tensors
from tests.inference.test_completions_way import cpu_seconds, engine_process, rests_soon
from tests.jobs.jobs import KEYS, LONG, SHORT, budget, money, post_job, read, result_of, submit, wait_for
from tests.stack import Stack, StackUser

ONES = base64.b64encode(struct.pack("<64f", *[1.0] * 64)).decode()
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00\Z")


@pytest.fixture
def user(inference_stack: Stack) -> StackUser:
    return inference_stack.new_user(jobs_unfinished=1000)


@pytest.fixture
def client(inference_stack: Stack, user: StackUser) -> Iterator[httpx.Client]:
    with inference_stack.client(user) as client:
        yield client


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def test_a_job_is_accepted_run_and_fetched(client: httpx.Client, inference_stack: Stack, user: StackUser) -> None:
    answer = post_job(client, SHORT)
    job = answer.json()
    assert answer.status_code == 202
    assert set(job) == KEYS
    path = f"/v1/completion-jobs/{job['id']}"
    assert answer.headers["Location"] == job["status_url"] == path
    assert job["result_url"] == f"{path}/result"
    assert uuid.UUID(job["id"]).version == 7
    assert job["request_id"] == f"req_job_{uuid.UUID(job['id']).hex}"
    assert (job["status"], job["cancel_requested"], job["result_expired"]) == ("queued", False, False)
    assert (job["started_at"], job["finished_at"], job["expires_at"]) == (None, None, None)

    result = result_of(client, job["id"])
    ended = read(client, job["id"])
    assert (ended["status"], ended["usage_pending"]) == ("succeeded", False)
    assert all(TIME.match(ended[name]) for name in ("created_at", "started_at", "finished_at", "expires_at"))
    assert ended["created_at"] <= ended["started_at"] <= ended["finished_at"] < ended["expires_at"]
    assert result.status_code == 200
    assert result.headers["content-type"] == "application/json"
    completion = client.post("completions", json=SHORT).json()
    assert without_identity(result.json()) == without_identity(completion)
    found = money(inference_stack, user)
    assert found["charges"] == {job["id"]: completion["usage"]["total_tokens"]}
    assert (found["live"], found["wrong"]) == (0, 0)


def test_steering_that_is_refused_names_its_bytes(client: httpx.Client) -> None:
    for tensor, key, counts in wrong_tensors():
        layers = list(range(2 if tensor["shape"] == [2, 64] else 1))
        vector = {"activations": tensor, "layer_indices": layers, "norm_match": True}
        body = {**SHORT, "apply_steering_vectors": [vector]}
        for answer in (client.post("completions", json=body), post_job(client, body)):
            assert_named(answer, param=f"apply_steering_vectors.0.activations.{key}", counts=counts)


def test_a_job_is_taken_at_once_by_a_worker_that_is_idle(client: httpx.Client) -> None:
    submit(client, SHORT)
    waits = []
    for _ in range(5):
        ended = wait_for(client, submit(client, SHORT)["id"])
        created_at, started_at = (datetime.fromisoformat(ended[name]) for name in ("created_at", "started_at"))
        waits.append((started_at - created_at).total_seconds())
    # A worker that nobody tells looks every two seconds.
    assert min(waits) < 0.7, waits


def test_a_lost_message_only_costs_seconds(client: httpx.Client, inference_stack: Stack, user: StackUser) -> None:
    silently = """
from accounts.models import User
from inference.models import BaseModel
from tests.jobs.conftest import submit
result = str(submit(User.objects.get(pk=user), None, BaseModel.objects.get(name="tiny")).pk)
"""
    job_id = inference_stack.django(silently, user=user.id)
    assert wait_for(client, job_id, seconds=30)["status"] == "succeeded"


def test_jobs_run_side_by_side(client: httpx.Client) -> None:
    for _ in range(10):
        submit(client, LONG | {"prompt": ["The capital"] * 4, "max_tokens": 300})
    most, found = 0, [{"status": "queued"}]
    while any(job["status"] != "succeeded" for job in found):
        # One statement reads them all: of Jobs that are read one by one, one may begin when another has ended.
        found = client.get("completion-jobs", params={"limit": 100}).raise_for_status().json()["data"]
        running = [job for job in found if job["status"] == "running"]
        assert all(job["usage_pending"] for job in running)
        most = max(most, len(running))
    # Of one User, eight at once.
    assert 2 < most <= 8


def test_a_replay_answers_the_job_as_it_is_now(client: httpx.Client) -> None:
    first = submit(client, SHORT, key="again")
    wait_for(client, first["id"])
    again = post_job(client, SHORT, key="again")
    assert again.status_code == 200
    assert (again.json()["id"], again.json()["status"]) == (first["id"], "succeeded")
    other = post_job(client, SHORT | {"max_tokens": 5}, key="again")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert other.headers["x-should-retry"] == "false"
    # A body that the fields refuse is a conflict too, as its key was used for another.
    assert post_job(client, {"model": 1}, key="again").status_code == 409


def test_one_key_from_many_connections_makes_one_job(inference_stack: Stack, user: StackUser) -> None:
    def post(number: int) -> tuple[int, str]:
        with inference_stack.client(user) as client:
            answer = post_job(client, SHORT, key="many")
            return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(post, range(32)))
    assert sorted(status for status, _ in answers) == [200] * 31 + [202]
    (job_id,) = {job_id for _, job_id in answers}
    with inference_stack.client(user) as client:
        wait_for(client, job_id)
    found = money(inference_stack, user)
    assert list(found["charges"]) == [job_id]
    assert found["wrong"] == 0


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (SHORT | {"stream": True}, "invalid_request", "stream"),
        (SHORT | {"max_tokens": "4"}, "invalid_request", "max_tokens"),
        (SHORT | {"n_tokens": 4}, "invalid_request", "n_tokens"),
        (SHORT | {"model": "nothing"}, "model_not_found", "model"),
        (SHORT | {"prompt": "a " * 3000}, "context_length_exceeded", "prompt"),
        (SHORT | {"output_residual_stream": [99]}, "invalid_request", "output_residual_stream.0"),
    ],
)
def test_what_a_completion_would_refuse_makes_no_job(
    client: httpx.Client, body: dict[str, Any], code: str, param: str
) -> None:
    answer = post_job(client, body, key="refused")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert client.get("completion-jobs").json()["data"] == []
    # The key was not used up.
    assert post_job(client, SHORT | {"stream": False}, key="refused").status_code == 202


def test_a_key_is_required_and_checked(client: httpx.Client) -> None:
    for headers in ({}, {"Idempotency-Key": ""}, {"Idempotency-Key": "x" * 256}, {"Idempotency-Key": "a\tb"}):
        answer = client.post("completion-jobs", json=SHORT, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_strangers_see_nothing(client: httpx.Client, inference_stack: Stack) -> None:
    job = submit(client, SHORT)
    with inference_stack.client(inference_stack.new_user()) as stranger:
        never = uuid.UUID(int=7)
        for method, path in (("GET", ""), ("GET", "/result"), ("POST", "/cancel")):
            theirs = stranger.request(method, f"completion-jobs/{job['id']}{path}")
            none = stranger.request(method, f"completion-jobs/{never}{path}")
            assert theirs.status_code == none.status_code == 404
            assert theirs.json() == none.json()
        assert stranger.get("completion-jobs").json()["data"] == []
        assert stranger.get("completion-jobs", params={"after": job["id"]}).status_code == 400
    assert client.get("completion-jobs/nothing").status_code == 404


def test_the_list_is_newest_first_and_filtered(client: httpx.Client) -> None:
    ids = [submit(client, SHORT)["id"] for _ in range(5)]
    for job_id in ids:
        wait_for(client, job_id)
    first = client.get("completion-jobs", params={"limit": 2}).json()
    assert ([job["id"] for job in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    rest = client.get("completion-jobs", params={"after": first["data"][-1]["id"], "limit": 3}).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    assert len(client.get("completion-jobs", params={"status": "succeeded", "model": "tiny"}).json()["data"]) == 5
    assert client.get("completion-jobs", params={"status": "failed"}).json()["data"] == []
    assert client.get("completion-jobs", params={"model": "other"}).json()["data"] == []


@pytest.mark.parametrize("fields", [{"output_residual_stream": [0, 2]}, {"output_residual_stream": True}])
def test_activations_and_steering_are_those_of_a_completion(client: httpx.Client, fields: dict[str, Any]) -> None:
    vector = {
        "activations": {
            "data": ONES,
            "dtype": "float32",
            "original_dtype": "torch.float32",
            "shape": [1, 64],
            "compression": "none",
        },
        "layer_indices": [1],
        "scale": 2.0,
    }
    body = SHORT | fields | {"apply_steering_vectors": [vector], "logprobs": 2}
    result = result_of(client, submit(client, body)["id"])
    assert result.status_code == 200, result.text
    assert without_identity(result.json()) == without_identity(client.post("completions", json=body).json())


def test_a_large_result_comes_from_storage_in_pieces(client: httpx.Client, inference_stack: Stack) -> None:
    body = {
        "model": "tiny",
        "prompt": [2 + number % 600 for number in range(500)],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": -1,
    }
    job = submit(client, body)
    wait_for(client, job["id"])
    api = psutil.Process(inference_stack.children["api"].process.pid)
    before, most, received = api.memory_info().rss, 0, 0
    with client.stream("GET", f"completion-jobs/{job['id']}/result") as answer:
        assert answer.status_code == 200
        for part in answer.iter_bytes(256 * 1024):
            received += len(part)
            most = max(most, api.memory_info().rss - before)
    assert received == int(answer.headers["Content-Length"]) > 15_000_000
    assert most < 8 * 1024 * 1024
    (file,) = (inference_stack.files / "jobs" / job["id"]).iterdir()
    assert file.stat().st_size == received
    file.rename(file.with_suffix(".away"))
    lost = client.get(f"completion-jobs/{job['id']}/result")
    assert (lost.status_code, lost.json()["error"]["code"]) == (500, "job_failed")
    assert lost.json()["request_id"] == job["request_id"]


# Cancels


def test_a_running_job_is_cancelled_at_once_and_its_engine_stops(
    client: httpx.Client, inference_stack: Stack, user: StackUser
) -> None:
    engine = engine_process(inference_stack)
    job = submit(client, LONG)
    wait_for(client, job["id"], until=("running",))
    waiting = client.get(f"completion-jobs/{job['id']}/result")
    assert (waiting.status_code, waiting.headers["Retry-After"]) == (202, "1")
    assert waiting.json()["usage_pending"] is True
    assert budget(client)[1] > 0
    used, deadline = cpu_seconds(engine), time.monotonic() + 60
    while cpu_seconds(engine) - used < 1.0:
        # It has read all prompts by then.
        assert time.monotonic() < deadline
        time.sleep(0.02)
    others = [submit(client, LONG) for _ in range(2)]
    for other in others:
        wait_for(client, other["id"], until=("running",))
    answers, seconds = [], []
    for each in (job, *others):
        began = time.monotonic()
        answers.append(client.post(f"completion-jobs/{each['id']}/cancel"))
        seconds.append(time.monotonic() - began)
    # Of three, for a busy machine: each would take a second if the worker said nothing.
    assert min(seconds) < 0.9, "the worker's own count was not awaited but timed out"
    answer = answers[0]
    ended = answer.json()
    assert (answer.status_code, ended["status"], ended["cancel_requested"]) == (200, "cancelled", True)
    assert ended["finished_at"] is not None
    assert ended["usage_pending"] is False
    assert client.post(f"completion-jobs/{job['id']}/cancel").json() == ended
    result = client.get(f"completion-jobs/{job['id']}/result")
    assert (result.status_code, result.json()["error"]["code"]) == (409, "job_cancelled")
    assert rests_soon(engine)
    found = money(inference_stack, user)
    # The prompts' tokens, and some of what was asked for.
    prompts = 60 * 2
    assert prompts <= found["charges"][job["id"]] < prompts + 60 * 480
    assert (found["live"], found["wrong"]) == (0, 0)


def test_a_completion_does_not_wait_behind_the_prompts_of_jobs(client: httpx.Client) -> None:
    jobs = [submit(client, LONG) for _ in range(5)]
    for job in jobs:
        wait_for(client, job["id"], until=("running",))
    answer = client.post("completions", json=SHORT)
    assert answer.status_code == 200, answer.text
    # Behind the three hundred prompts of all five it would come when the last of them ends.
    still_running = [job for job in jobs if read(client, job["id"])["status"] == "running"]
    assert len(still_running) >= 2
    for job in jobs:
        client.post(f"completion-jobs/{job['id']}/cancel")


def test_a_cancel_of_an_ended_job_changes_nothing(client: httpx.Client) -> None:
    job = submit(client, SHORT)
    ended = wait_for(client, job["id"])
    answer = client.post(f"completion-jobs/{job['id']}/cancel")
    assert (answer.status_code, answer.json()) == (200, ended)
