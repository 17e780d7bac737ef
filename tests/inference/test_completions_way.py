"""What a client's behaviour does to a Completion under way: leaving, reading slowly, asking for too much at once."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from tests.inference.second_api import second_api
from tests.stack import Stack, StackUser

# Work of some seconds, however fast the machine: 60 sequences of 480 tokens.
LONG = {"model": "tiny", "prompt": ["The capital"] * 60, "max_tokens": 480, "temperature": 0, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "The capital", "max_tokens": 1, "temperature": 0}
STOPPED = "A request was stopped: nobody waits for it."


def engine_process(stack: Stack) -> psutil.Process:
    worker = psutil.Process(stack.children["inference"].process.pid)
    (fork_server,) = (child for child in worker.children() if "forkserver" in " ".join(child.cmdline()))
    (engine,) = fork_server.children()
    return engine


def busy_share(process: psutil.Process, seconds: float) -> float:
    """Return how much of one core the process used over the next seconds."""
    before, began = cpu_seconds(process), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(process) - before) / (time.monotonic() - began)


def cpu_seconds(process: psutil.Process) -> float:
    """Return how much of a core's time the process has used: what else the machine does is not in it."""
    times = process.cpu_times()
    return times.user + times.system


def rests_soon(process: psutil.Process) -> bool:
    """Return whether the process ends its step and then does nothing: LONG would run on for seconds."""
    return any(busy_share(process, 0.5) < 0.2 for _ in range(3))


async def until_working(process: psutil.Process) -> None:
    """Wait until the engine works."""
    for _ in range(100):
        if await asyncio.to_thread(busy_share, process, 0.2) > 0.05:
            return
    raise AssertionError("the engine never worked")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_stops_its_request_within_a_second(inference_stack: Stack, is_stream: bool) -> None:
    engine = engine_process(inference_stack)
    stopped_before = inference_stack.log("inference").count(STOPPED)
    async with inference_stack.async_client() as client:
        await client.post("completions", json=SHORT)
        asking = asyncio.create_task(client.post("completions", json=LONG | {"stream": is_stream}))
        await until_working(engine)
        used, deadline = cpu_seconds(engine), time.monotonic() + 60
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while inference_stack.log("inference").count(STOPPED) == stopped_before:
            assert cpu_seconds(engine) - used < 1.5, "the engine went on for a second and a half after the client left"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    assert await asyncio.to_thread(rests_soon, engine)


def test_a_stream_that_is_left_midway_stops_too(inference_stack: Stack) -> None:
    engine = engine_process(inference_stack)
    stopped_before = inference_stack.log("inference").count(STOPPED)
    with (
        inference_stack.client() as client,
        client.stream("POST", "completions", json=LONG | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        used = cpu_seconds(engine)
    deadline = time.monotonic() + 60
    while inference_stack.log("inference").count(STOPPED) == stopped_before:
        assert cpu_seconds(engine) - used < 1.5
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert rests_soon(engine)


# Reading slowly


@pytest.fixture
def broker(inference_stack: Stack) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(inference_stack.env["BROKER_URL"]) as client:
        yield client


def test_a_client_that_reads_slowly_fills_neither_the_api_nor_redis(
    inference_stack: Stack, broker: redis.Redis
) -> None:
    body = {
        "model": "tiny",
        "prompt": [2 + number % 600 for number in range(500)],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": -1,
    }
    api = psutil.Process(inference_stack.children["api"].process.pid)
    with inference_stack.client() as client:
        client.post("completions", json=SHORT)
    memory_before, redis_before = api.memory_info().rss, int(broker.info("memory")["used_memory"])
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {inference_stack.user.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", inference_stack.port))
        connection.sendall(head.encode() + content)
        received = bytearray(connection.recv(1024))
        for _ in range(30):
            time.sleep(0.05)
            received += connection.recv(4096)
            assert int(broker.info("memory")["used_memory"]) - redis_before < 6 * 1024 * 1024
        # Of some 20 MB: the window of 2 MiB, what Redis' reader and the sockets hold, and no more.
        assert api.memory_info().rss - memory_before < 14 * 1024 * 1024
        while part := connection.recv(1 << 20):
            received += part
    headers, _, answered = bytes(received).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    length = next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length"))
    assert int(length.split(b":")[1]) == len(answered) > 15_000_000
    positions = json.loads(answered)["choices"][0]["prompt_logprobs"]
    assert [len(position) for position in positions[1:]] == [640] * 499


# The places of a key


async def until_standing(broker: redis.Redis, user: StackUser, *, running: int, waiting: int) -> None:
    """Wait until so many requests of the user's key run and so many wait."""
    places = f"acs:places:key-{user.key_id}"
    for _ in range(1000):
        if (broker.scard(f"{places}:running"), broker.zcard(f"{places}:waiting")) == (running, waiting):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{broker.scard(f'{places}:running')} run, {broker.zcard(f'{places}:waiting')} wait")


async def test_places_and_turns_of_a_key_hold_across_api_processes(
    inference_stack: Stack, broker: redis.Redis, tmp_path: Path
) -> None:
    user = inference_stack.new_user(requests_at_once=1, requests_queued=3)
    other = inference_stack.new_user(requests_at_once=1, requests_queued=3)
    # It runs while the others get in line behind it, one after the other.
    slow = LONG | {"prompt": ["The capital"] * 24}
    with second_api(inference_stack, tmp_path / "api.log") as second_url:
        async with (
            inference_stack.async_client(user) as one,
            inference_stack.async_client(user, base_url=second_url) as two,
            inference_stack.async_client(other, base_url=second_url) as stranger,
        ):
            finished: list[str] = []

            async def ask(name: str, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
                response = await client.post("completions", json=body)
                finished.append(name)
                return response

            for client in (one, two, stranger):
                assert (await client.post("completions", json=SHORT)).status_code == 200
            running = asyncio.create_task(ask("running", one, slow))
            await until_standing(broker, user, running=1, waiting=0)
            line = []
            for name, client in (("first", two), ("leaves", one), ("second", two)):
                line.append(asyncio.create_task(ask(name, client, SHORT)))
                await until_standing(broker, user, running=1, waiting=len(line))
            for client in (one, two):
                refused = await client.post("completions", json=SHORT)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                assert int(refused.headers["Retry-After"]) >= 1
            # Another key is not held up.
            assert (await ask("stranger", stranger, SHORT)).status_code == 200
            line[1].cancel()
            await until_standing(broker, user, running=1, waiting=2)
            third = asyncio.create_task(ask("third", one, SHORT))
            answers = await asyncio.gather(running, line[0], line[2], third)
            assert [answer.status_code for answer in answers] == [200] * 4
            assert finished == ["stranger", "running", "first", "second", "third"]


async def test_the_default_places_are_sixteen_and_sixty_four(inference_stack: Stack, broker: redis.Redis) -> None:
    user = inference_stack.new_user(requests_at_once=None, requests_queued=None)
    # More connections than places: the client itself must not hold requests back.
    limits = httpx.Limits(max_connections=100)
    slow = LONG | {"prompt": ["The capital"] * 4, "max_tokens": 480}
    async with inference_stack.async_client(user, limits=limits) as client:
        asking = [asyncio.create_task(client.post("completions", json=slow)) for _ in range(16)]
        await until_standing(broker, user, running=16, waiting=0)
        asking += [asyncio.create_task(client.post("completions", json=SHORT)) for _ in range(64)]
        await until_standing(broker, user, running=16, waiting=64)
        refused = await client.post("completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}


# Its end


async def test_past_the_time_limit_the_answer_is_a_timeout_and_the_engine_stops(
    inference_stack: Stack, tmp_path: Path
) -> None:
    engine = engine_process(inference_stack)
    with second_api(inference_stack, tmp_path / "api.log", ENGINE_TIME_LIMIT="3.0") as url:
        async with inference_stack.async_client(base_url=url) as client:
            answer = await client.post("completions", json=LONG)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "engine_timeout"
            async with client.stream("POST", "completions", json=LONG | {"stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert response.status_code == 200
            # An error after the first byte is a frame of its own, and the last one.
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_timeout"
            assert "choices" in json.loads(lines[-2].removeprefix("data: "))
        assert await asyncio.to_thread(rests_soon, engine)
