"""Completions hold from their arrival to their end, and are charged once what their engine counted."""

import asyncio
import contextlib
import json
import re
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import conftest
from tests.inference.money import Money, money_of, set_limits
from tests.inference.second_api import further_apis, second_api, warm_up
from tests.inference.test_completions_way import LONG, SHORT, engine_process, until_working
from tests.stack import Stack, StackUser

FOUR = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG_HOLD = 60 * 3 + 60 * 480


@pytest.fixture
def user(inference_stack: Stack) -> StackUser:
    return inference_stack.new_user()


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def until_held(stack: Stack, user: StackUser, tokens: list[int]) -> None:
    """Wait until the User's live Holds are of so many tokens."""
    async with asyncio.timeout(30):
        while await asyncio.to_thread(lambda: money_of(stack, user, is_final=False).held) != tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# What is charged


@pytest.mark.parametrize(
    ("fields", "charged"),
    [
        ({}, 3 + 4),
        ({"n": 3}, 3 + 3 * 4),
        ({"prompt": [[5, 6, 7], [8, 9]], "n": 2}, 5 + 4 * 4),
        ({"echo": True, "max_tokens": 0}, 3),
        ({"echo": True, "logprobs": 1}, 3 + 4),
        ({"output_residual_stream": [0]}, 3 + 4),
    ],
)
def test_a_whole_answer_is_charged_its_usage(
    inference_stack: Stack, user: StackUser, fields: dict[str, Any], charged: int
) -> None:
    with inference_stack.client(user) as client:
        answer = client.post("completions", json=FOUR | fields)
    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] == charged
    assert money_of(inference_stack, user) == Money([], [], [charged], [])


def test_a_stream_is_charged_its_usage_asked_for_or_not(inference_stack: Stack, user: StackUser) -> None:
    with inference_stack.client(user) as client:
        told = client.post("completions", json=FOUR | {"stream": True, "stream_options": {"include_usage": True}})
        untold = client.post("completions", json=FOUR | {"stream": True})
    assert chunks_of(told)[-1]["usage"]["total_tokens"] == 7
    assert not any("usage" in chunk for chunk in chunks_of(untold))
    assert money_of(inference_stack, user).charged == [7, 7]


def test_what_ends_early_is_charged_what_was_made_and_not_what_was_held(
    inference_stack: Stack, user: StackUser
) -> None:
    with inference_stack.client(user) as client:
        first = client.post("completions", json=FOUR | {"return_token_ids": True}).json()["choices"][0]["token_ids"]
        stopping = FOUR | {"max_tokens": 500, "stop_token_ids": [first[1]]}
        usage = client.post("completions", json=stopping).json()["usage"]
    assert usage["completion_tokens"] < 4
    assert money_of(inference_stack, user).charged == [7, usage["total_tokens"]]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_is_charged_what_was_generated_until_then(
    inference_stack: Stack, user: StackUser, is_stream: bool
) -> None:
    engine = engine_process(inference_stack)
    async with inference_stack.async_client(user) as client:
        asking = asyncio.create_task(client.post("completions", json=LONG | {"stream": is_stream}))
        await until_working(engine)
        await until_held(inference_stack, user, [LONG_HOLD])
        await asyncio.sleep(0.5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    # Before the engine's own count would be given up.
    money = money_of(inference_stack, user, seconds=8)
    assert (money.released, len(money.charged)) == ([], 1)
    assert 3 < money.charged[0] < LONG_HOLD


async def test_past_the_time_limit_what_was_generated_is_charged(
    inference_stack: Stack, user: StackUser, tmp_path: Path
) -> None:
    with second_api(inference_stack, tmp_path / "api.log", ENGINE_TIME_LIMIT="2.5") as url:
        await warm_up(inference_stack, url)
        async with inference_stack.async_client(user, base_url=url) as client:
            assert refusal_of(await client.post("completions", json=LONG)) == (504, "engine_timeout")
            streamed = await client.post("completions", json=LONG | {"stream": True})
            last = [line for line in streamed.text.splitlines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_timeout"
            money = money_of(inference_stack, user)
    assert (money.released, len(money.charged)) == ([], 2)
    assert all(3 < charged < LONG_HOLD for charged in money.charged)


async def test_a_place_that_is_never_granted_costs_nothing(inference_stack: Stack, tmp_path: Path) -> None:
    user = inference_stack.new_user(requests_at_once=1, requests_queued=1)
    engine = engine_process(inference_stack)
    with second_api(inference_stack, tmp_path / "api.log", ENGINE_TIME_LIMIT="2.0") as url:
        await warm_up(inference_stack, url)
        async with (
            inference_stack.async_client(user) as client,
            inference_stack.async_client(user, base_url=url) as hasty,
        ):
            running = asyncio.create_task(client.post("completions", json=LONG))
            await until_working(engine)
            waiting = asyncio.create_task(hasty.post("completions", json=FOUR))
            await until_held(inference_stack, user, [LONG_HOLD, 7])
            # The line is full, and who is refused for it holds nothing.
            assert refusal_of(await client.post("completions", json=FOUR)) == (429, "queue_full")
            assert refusal_of(await waiting) == (504, "engine_timeout")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    money = money_of(inference_stack, user)
    assert (money.released, len(money.charged)) == ([7], 1)


def test_a_request_that_is_refused_for_its_fields_or_model_holds_nothing(
    inference_stack: Stack, user: StackUser
) -> None:
    with inference_stack.client(user) as client:
        for fields in ({"max_tokens": -1}, {"model": "none"}, {"max_tokens": 10_000}):
            assert client.post("completions", json=FOUR | fields).status_code == 400
    assert money_of(inference_stack, user) == Money([], [], [], [])


# What is refused


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(("tokens", "cap", "whose"), [(20, None, "your Budget"), (1000, 20, "the cap of this API key")])
def test_what_does_not_fit_is_refused_and_says_what_is_left_until_when(
    inference_stack: Stack, user: StackUser, fields: dict[str, Any], tokens: int, cap: int | None, whose: str
) -> None:
    set_limits(inference_stack, user, tokens=tokens, cap=cap)
    with inference_stack.client(user) as client:
        assert client.post("completions", json=FOUR).status_code == 200
        money_of(inference_stack, user)
        answer = client.post("completions", json=FOUR | {"max_tokens": 11} | fields)
        assert refusal_of(answer) == (429, "budget_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert "Retry-After" not in answer.headers
        message = answer.json()["error"]["message"]
        assert "needs 14 tokens, and 13 " in message
        assert whose in message
        assert re.search(r"20\d\d-\d\d-01T00:00:00\.000\+00:00", message)
        # What fits, fits.
        assert client.post("completions", json=FOUR | {"max_tokens": 10} | fields).status_code == 200
    assert money_of(inference_stack, user) == Money([], [], [7, 13], [])


async def test_64_requests_to_four_api_processes_with_room_for_10_are_10(
    inference_stack: Stack, user: StackUser, tmp_path: Path
) -> None:
    set_limits(inference_stack, user, tokens=76)
    logs = [tmp_path / f"api-{number}.log" for number in range(3)]
    with further_apis(inference_stack, logs) as further:
        limits = httpx.Limits(max_connections=64)
        async with contextlib.AsyncExitStack() as open_clients:
            clients = [
                await open_clients.enter_async_context(inference_stack.async_client(user, limits=limits, base_url=url))
                for url in (f"{inference_stack.base_url}/v1/", *further)
            ]
            asking = [client.post("completions", json=FOUR) for _ in range(16) for client in clients]
            answers = await asyncio.gather(*asking)
    outcomes = [answer.status_code if answer.status_code == 200 else refusal_of(answer) for answer in answers]
    assert outcomes.count((429, "budget_exceeded")) == 54
    # A sequence of 7 tokens has a Hold of 7: nothing comes back that another could take.
    assert outcomes.count(200) == 10
    money = money_of(inference_stack, user)
    assert (sum(money.charged), len(money.charged), money.released) == (70, 10, [])


# What it costs


def test_a_completion_is_two_statements(inference_stack: Stack, user: StackUser, tmp_path: Path) -> None:
    """Its Hold and its settlement; its key, the Base models and the spending are read once a second for all."""
    logged = f"{inference_stack.env['DATABASE_URL']}&{urllib.parse.urlencode({'options': '-c log_statement=all'})}"
    (log,) = (conftest.HOME / "logs").glob("postgres*")

    entry = re.compile(r"LOG:  (?:execute [^:]*|statement): +(.*?)(?=\n\S*\d{4}-\d\d-\d\d |\Z)", re.DOTALL)

    def statements() -> list[str]:
        return entry.findall(log.read_text())

    with (
        second_api(inference_stack, tmp_path / "api.log", DATABASE_URL=logged) as url,
        inference_stack.client(user, base_url=url) as client,
    ):
        client.post("completions", json=SHORT)
        money_of(inference_stack, user)
        before, began = len(statements()), time.monotonic()
        for _ in range(20):
            assert client.post("completions", json=SHORT).status_code == 200
        money_of(inference_stack, user)
    seconds = time.monotonic() - began
    seen = Counter(" ".join(text.split()) for text in statements()[before:])
    of_each = sorted(text.partition(" ")[0] for text, times in seen.items() if times >= 20)
    assert of_each == ["WITH", "WITH"], seen
    assert max(seen.values()) == 20
    # What is read once a second for all is read the more often the longer all take.
    assert seen.total() < 2 * 20 + 20 + 4 * seconds, seen
