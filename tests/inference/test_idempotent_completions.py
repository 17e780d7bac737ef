"""Completions with an Idempotency-Key: once done, once charged, and answered the same for 24 hours."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inference.money import Money, money_of, set_limits
from tests.inference.second_api import second_api, warm_up
from tests.inference.test_completions_way import LONG, engine_process, until_working
from tests.stack import Stack, StackUser

FOUR = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1.5, "ignore_eos": True}
# 2 to 3 seconds of the engine.
SOME = LONG | {"max_tokens": 100}
JSON = {"Content-Type": "application/json"}
LARGE = {"model": "tiny", "prompt": list(range(5, 105)), "max_tokens": 1, "prompt_logprobs": -1, "temperature": 0}


@pytest.fixture
def user(inference_stack: Stack) -> StackUser:
    return inference_stack.new_user()


def keyed(key: str) -> dict[str, Any]:
    return {"headers": {"Idempotency-Key": key}}


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_retry_gets_the_first_answer_byte_for_byte_and_is_charged_once(
    inference_stack: Stack, user: StackUser
) -> None:
    reordered = json.dumps(dict(reversed(FOUR.items())), indent=3)
    with inference_stack.client(user) as client:
        first = client.post("completions", json=FOUR, **keyed("k 1"))
        again = client.post("completions", content=reordered, headers={"Idempotency-Key": "k 1"} | JSON)
        other = client.post("completions", json=FOUR, **keyed("k 2"))
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert again.headers["Content-Type"] == first.headers["Content-Type"] == "application/json"
    assert again.headers["X-Request-Id"] != first.headers["X-Request-Id"]
    assert other.json()["id"] != first.json()["id"]
    assert money_of(inference_stack, user) == Money([], [], [7, 7], [])


def test_keys_are_one_set_for_all_keys_of_a_user_and_none_of_others(inference_stack: Stack, user: StackUser) -> None:
    make = """
from accounts.models import User
from accounts.services import create_key
result = create_key(user=User.objects.get(pk=user), name="second")[1]
"""
    second = StackUser(user.id, 0, user.username, inference_stack.django(make, user=user.id))
    stranger = inference_stack.new_user()
    answers = []
    for asker in (user, second, stranger):
        with inference_stack.client(asker) as client:
            answers.append(client.post("completions", json=FOUR, **keyed("shared")).json()["id"])
    assert answers[0] == answers[1] != answers[2]
    assert money_of(inference_stack, user).charged == [7]


def test_another_request_with_the_key_is_a_conflict(inference_stack: Stack, user: StackUser) -> None:
    with inference_stack.client(user) as client:
        assert client.post("completions", json=FOUR, **keyed("k")).status_code == 200
        # The key comes before the fields and the model.
        for fields in ({"max_tokens": 5}, {"max_tokens": -1}, {"model": "none"}, {"stream": True}, {"user": None}):
            answer = client.post("completions", json=FOUR | fields, **keyed("k"))
            assert refusal_of(answer) == (409, "idempotency_conflict")
            assert answer.headers["x-should-retry"] == "false"
            assert "Retry-After" not in answer.headers
    assert money_of(inference_stack, user).charged == [7]


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(inference_stack: Stack, user: StackUser, key: str) -> None:
    with inference_stack.client(user) as client:
        answer = client.post("completions", json=FOUR, **keyed(key))
    assert refusal_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_a_key_is_not_taken_with_stream(inference_stack: Stack, user: StackUser) -> None:
    with inference_stack.client(user) as client:
        answer = client.post("completions", json=FOUR | {"stream": True}, **keyed("k"))
        assert refusal_of(answer) == (400, "invalid_request")
        assert answer.json()["error"]["param"] == "Idempotency-Key"
        assert client.post("completions", json=FOUR | {"stream": False}, **keyed("k")).status_code == 200


def test_a_refusal_before_any_work_does_not_use_the_key_up(inference_stack: Stack, user: StackUser) -> None:
    with inference_stack.client(user) as client:
        assert client.post("completions", json=FOUR | {"n": 0}, **keyed("k")).status_code == 400
        assert client.post("completions", json=FOUR | {"model": "none"}, **keyed("k")).status_code == 400
        set_limits(inference_stack, user, tokens=8)
        refused = client.post("completions", json=FOUR | {"max_tokens": 6}, **keyed("k"))
        assert refusal_of(refused) == (429, "budget_exceeded")
        first = client.post("completions", json=FOUR, **keyed("k"))
        assert first.status_code == 200
        # Now it is used, and answered also when the Budget is gone.
        assert client.post("completions", json=FOUR, **keyed("k")).content == first.content
    assert money_of(inference_stack, user) == Money([], [], [7], [])


def test_an_answer_over_a_mebibyte_is_kept_in_storage(inference_stack: Stack, user: StackUser) -> None:
    with inference_stack.client(user) as client:
        first = client.post("completions", json=LARGE, **keyed("k"))
        files = [path for path in (inference_stack.files / "idempotency").rglob("*") if path.is_file()]
        again = client.post("completions", json=LARGE, **keyed("k"))
        plain = client.post("completions", json=LARGE)
    assert [path.stat().st_size for path in files] == [len(first.content)]
    assert len(first.content) > 1024 * 1024
    assert again.content == first.content
    assert again.headers["Content-Length"] == str(len(first.content))
    assert plain.json()["choices"] == first.json()["choices"]
    assert money_of(inference_stack, user).charged == [101, 101]


async def test_a_completion_with_a_key_runs_on_when_its_client_leaves(inference_stack: Stack, user: StackUser) -> None:
    engine = engine_process(inference_stack)
    async with inference_stack.async_client(user) as client:
        asking = asyncio.create_task(client.post("completions", json=SOME, **keyed("k")))
        await until_working(engine)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        # The retry waits for what runs.
        answer = await client.post("completions", json=SOME, **keyed("k"))
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 6_000
        assert (await client.post("completions", json=SOME, **keyed("k"))).content == answer.content
    assert money_of(inference_stack, user) == Money([], [], [answer.json()["usage"]["total_tokens"]], [])


async def test_a_retry_that_waits_too_long_is_told_to_come_again(
    inference_stack: Stack, user: StackUser, tmp_path: Path
) -> None:
    longer = LONG | {"prompt": ["The capital"] * 66}
    engine = engine_process(inference_stack)
    async with inference_stack.async_client(user) as client:
        first = asyncio.create_task(client.post("completions", json=longer, **keyed("k")))
        await until_working(engine)
        answers = []
        while not first.done():
            asked_at = time.monotonic()
            answers.append(await client.post("completions", json=longer, **keyed("k")))
            assert time.monotonic() - asked_at < 40
        for answer in answers:
            if answer.status_code == 200:
                assert answer.content == (await first).content
            else:
                assert refusal_of(answer) == (409, "idempotency_in_progress")
                assert answer.headers["Retry-After"] == "1"
    assert len(money_of(inference_stack, user).charged) == 1


async def test_32_connections_to_two_api_processes_with_one_key_are_one_charge(
    inference_stack: Stack, user: StackUser, tmp_path: Path
) -> None:
    limits = httpx.Limits(max_connections=32)
    with second_api(inference_stack, tmp_path / "api.log") as url:
        async with (
            inference_stack.async_client(user, limits=limits) as one,
            inference_stack.async_client(user, limits=limits, base_url=url) as two,
        ):
            asking = [client.post("completions", json=FOUR, **keyed("k")) for _ in range(16) for client in (one, two)]
            answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert money_of(inference_stack, user) == Money([], [], [7], [])


async def test_whoever_waits_for_one_that_is_refused_has_its_turn(inference_stack: Stack) -> None:
    user = inference_stack.new_user(requests_at_once=1, requests_queued=0)
    engine = engine_process(inference_stack)
    async with inference_stack.async_client(user) as client:
        # It runs while each of the four has its turn.
        running = asyncio.create_task(client.post("completions", json=SOME | {"max_tokens": 240}))
        await until_working(engine)
        refused = await asyncio.gather(*(client.post("completions", json=FOUR, **keyed("k")) for _ in range(4)))
        assert {refusal_of(answer) for answer in refused} == {(429, "queue_full")}
        assert (await running).status_code == 200
        assert (await client.post("completions", json=FOUR, **keyed("k"))).status_code == 200
    assert len(money_of(inference_stack, user).charged) == 2


async def test_an_error_after_work_began_is_the_answer_of_every_retry(
    inference_stack: Stack, user: StackUser, tmp_path: Path
) -> None:
    with second_api(inference_stack, tmp_path / "api.log", ENGINE_TIME_LIMIT="2.5") as url:
        await warm_up(inference_stack, url)
        async with inference_stack.async_client(user, base_url=url) as client:
            first = await client.post("completions", json=LONG, **keyed("k"))
            assert refusal_of(first) == (504, "engine_timeout")
            money = money_of(inference_stack, user)
            assert len(money.charged) == 1
            again = await client.post("completions", json=LONG, **keyed("k"))
    assert (again.status_code, again.content) == (504, first.content)
    assert money_of(inference_stack, user) == money
