"""What a Completion answers when a part of its way dies, and that the way mends itself.

One stack with a broker of its own, its tests in order: each leaves it as it found it, until the last stops the worker.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from acsinfra.quickstart.supervisor import Child
from inference.bus import keys
from tests import conftest
from tests.inference.broker import Broker
from tests.inference.money import money_of, sweep
from tests.inference.second_api import second_api
from tests.inference.test_completions_way import LONG, SHORT, STOPPED, busy_share, engine_process, until_working
from tests.stack import Stack, StackUser

# A worker gets two heartbeats to speak again where Redis lost what it knew: enough on a busy machine too.
HEARTBEAT_SECONDS = 1.5
SILENT_AFTER_SECONDS = 6.0
IS_HELD = "from budgets.models import Hold; result = Hold.objects.filter(state='live').exists()"
# The engine runs 64 sequences at once: four of these.
PART = LONG | {"prompt": ["The capital"] * 15}
PART_HOLD = 15 * 3 + 15 * 480
SOME = LONG | {"prompt": ["The capital"] * 16, "max_tokens": 200}


@pytest.fixture(scope="module")
def fragile(broker: Broker, tiny_model: Path) -> Iterator[Stack]:
    """Return a stack with its own broker and quick heartbeats; the API runs."""
    stack = Stack(
        conftest.SUPERVISOR, postgres=conftest.POSTGRES, broker_url=broker.url, tiny_model=tiny_model, name="fragile"
    )
    stack.env |= {"HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS), "ENGINE_SILENT_AFTER_SECONDS": str(SILENT_AFTER_SECONDS)}
    stack.start("api")
    yield stack
    stack.close()


@pytest.fixture
def user(fragile: Stack) -> Iterator[StackUser]:
    """Return a User whose Holds have all ended, each once, and add up after the test."""
    user = fragile.new_user()
    yield user
    money_of(fragile, user, seconds=20)


def counted(broker: Broker) -> set[bytes]:
    """The requests of which a worker has left a count."""
    with broker.client() as connection:
        return set(connection.keys(keys.count("*")))


async def until_counted(broker: Broker, before: set[bytes], *, requests: int) -> None:
    """Wait until so many more requests than `before` have a count, which a worker leaves every second."""
    async with asyncio.timeout(60):
        while len(counted(broker) - before) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def until_served(client: httpx.AsyncClient, *, seconds: float = 180) -> None:
    """Wait until a Completion succeeds; until then it fails in a clear way."""
    deadline = time.monotonic() + seconds
    while True:
        response = await client.post("completions", json=SHORT)
        if response.status_code == 200:
            return
        assert code_of(response) in {
            (503, "model_starting"),
            (503, "model_unavailable"),
            (503, "service_unavailable"),
            (502, "engine_error"),
        }
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any], started: asyncio.Event) -> list[str]:
    async with client.stream("POST", "completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = []
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
                started.set()
    return lines


def test_without_an_engine_the_model_is_unavailable_and_then_starting(fragile: Stack) -> None:
    with fragile.client() as client:
        assert code_of(client.post("completions", json=SHORT)) == (503, "model_unavailable")
        fragile.children["inference"] = fragile.spawn("inference")
        fragile.wait_for(lambda: client.get("models/tiny").json()["status"] == "starting", part="inference")
        response = client.post("completions", json=SHORT)
        assert code_of(response) == (503, "model_starting")
        assert int(response.headers["Retry-After"]) >= 1
        fragile.wait_until_ready("inference")
        assert client.post("completions", json=SHORT).status_code == 200


async def test_a_broker_that_restarts_loses_no_request(fragile: Stack, broker: Broker, user: StackUser) -> None:
    async with fragile.async_client(user) as client:
        await until_served(client)
        started = asyncio.Event()
        streaming = asyncio.create_task(read_stream(client, SOME, started))
        whole = [asyncio.create_task(client.post("completions", json=SOME)) for _ in range(3)]
        await started.wait()
        await asyncio.to_thread(broker.kill)
        late = asyncio.create_task(client.post("completions", json=SHORT))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(broker.start)
        lines = await streaming
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
        assert sum(chunk["finish_reason"] == "length" for chunk in chunks) == 16
        answers = [*await asyncio.gather(*whole), await late]
        assert {answer.status_code for answer in answers} == {200}
        usages = [answer.json()["usage"] for answer in answers]
        assert {usage["completion_tokens"] for usage in usages[:3]} == {16 * 200}
    money = money_of(fragile, user)
    # The first of all was the one that showed that the way is open.
    expected = sorted([usage["total_tokens"] for usage in usages] + [usages[0]["total_tokens"], money.charged[0]])
    assert (sorted(money.charged), money.released) == (expected, [])


async def test_a_broker_that_lost_its_data_loses_no_money_and_no_request(
    fragile: Stack, broker: Broker, user: StackUser
) -> None:
    async with fragile.async_client(user) as client:
        await until_served(client)
        started = asyncio.Event()
        streaming = asyncio.create_task(read_stream(client, SOME, started))
        whole = asyncio.create_task(client.post("completions", json=SOME, headers={"Idempotency-Key": "lost"}))
        await started.wait()
        await asyncio.sleep(0.2)
        # A worker that takes nothing for a moment, but for the first, which Redis gives to the one that waits for it.
        worker = psutil.Process(fragile.children["inference"].process.pid)
        worker.suspend()
        try:
            waiting = [asyncio.create_task(client.post("completions", json=SHORT)) for _ in range(2)]
            with broker.client() as connection:
                async with asyncio.timeout(60):
                    while connection.llen(keys.queue("tiny")) == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            await asyncio.to_thread(broker.kill)
        finally:
            worker.resume()
        broker.lose_data()
        await asyncio.to_thread(broker.start)
        # What runs goes on, and a sweep takes nobody for dead.
        assert sweep(fragile, missing_for=10) == [[0, 0, 0, 0]] * 2
        assert (await streaming)[-1] == "data: [DONE]"
        answer = await whole
        assert answer.status_code == 200
        # What no worker had is sent again.
        assert {lost.status_code for lost in await asyncio.gather(*waiting)} == {200}
        assert "requests were lost before a worker had them" in fragile.log("api")
    total = answer.json()["usage"]["total_tokens"]
    assert sorted(money_of(fragile, user).charged)[-2:] == [total, total]


async def test_a_broker_that_stays_away_is_a_503_and_its_return_is_enough(fragile: Stack, broker: Broker) -> None:
    async with fragile.async_client() as client:
        await asyncio.to_thread(broker.kill)
        asked_at = time.monotonic()
        response = await client.post("completions", json=SHORT)
        assert code_of(response) == (503, "service_unavailable")
        assert time.monotonic() - asked_at < 60
        await asyncio.to_thread(broker.start)
        await until_served(client)


async def test_an_engine_that_dies_fails_what_it_had_and_comes_back(
    fragile: Stack, broker: Broker, user: StackUser
) -> None:
    other = fragile.new_user()
    async with fragile.async_client(other) as client:
        await until_served(client)
    async with fragile.async_client(user) as client:
        engine = engine_process(fragile)
        before, started = counted(broker), asyncio.Event()
        streaming = asyncio.create_task(read_stream(client, PART, started))
        whole = [asyncio.create_task(client.post("completions", json=PART)) for _ in range(2)]
        keyed: dict[str, Any] = {"headers": {"Idempotency-Key": "died"}}
        whole.append(asyncio.create_task(client.post("completions", json=PART, **keyed)))
        await started.wait()
        await until_counted(broker, before, requests=4)
        killed_at = time.monotonic()
        engine.kill()
        answers, lines = await asyncio.gather(asyncio.gather(*whole), streaming)
        assert time.monotonic() - killed_at < 30
        assert {code_of(answer) for answer in answers} == {(502, "engine_error")}
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
        money = money_of(fragile, user)
        assert (len(money.charged), money.released) == (4, [])
        assert all(3 < charged < PART_HOLD for charged in money.charged)
    async with fragile.async_client(other) as client:
        await until_served(client)
    async with fragile.async_client(user) as client:
        # The error is the answer, also now that the engine is back.
        again = await client.post("completions", json=PART, **keyed)
        assert (again.status_code, again.content) == (502, answers[-1].content)
        assert money_of(fragile, user) == money
        assert engine_process(fragile).pid != engine.pid
        assert fragile.log("inference").count("another is started") == 1


async def test_the_requests_and_places_of_an_api_process_that_dies_end(fragile: Stack, tmp_path: Path) -> None:
    user = fragile.new_user(requests_at_once=1, requests_queued=5)
    engine = engine_process(fragile)
    keyed: dict[str, Any] = {"headers": {"Idempotency-Key": "killed"}}
    longer = LONG | {"prompt": ["The"] * 66}
    async with fragile.async_client(user) as client:
        await until_served(client)
        short = money_of(fragile, user).charged[-1]
        stopped_before = fragile.log("inference").count(STOPPED)
        with contextlib.suppress(AssertionError), second_api(fragile, tmp_path / "api.log") as url:
            async with fragile.async_client(user, base_url=url) as doomed:
                asking = asyncio.create_task(doomed.post("completions", json=longer, **keyed))
                await until_working(engine)
                (second,) = (
                    process
                    for process in psutil.Process().children()
                    if str(url.port) in process.cmdline() and "uvicorn" in process.cmdline()
                )
                second.kill()
                with pytest.raises(httpx.TransportError):
                    await asking
        died_at = time.monotonic()
        answer = await client.post("completions", json=SHORT)
        assert answer.status_code == 200
        assert time.monotonic() - died_at < 120
        # The answer's own Hold ends off its client's way.
        while len(money_of(fragile, user, is_final=False).held) != 1:
            assert time.monotonic() - died_at < 120
        assert code_of(await client.post("completions", json=longer, **keyed)) == (409, "idempotency_in_progress")
        while fragile.log("inference").count(STOPPED) == stopped_before and busy_share(engine, 0.5) > 0.2:
            assert time.monotonic() - died_at < 120
        # The worker's last count is charged, once, and the key has an answer that says so.
        while (swept := sweep(fragile)) == [[0, 0, 0, 0]] * 2:
            assert time.monotonic() - died_at < 120
            await asyncio.sleep(0.2)
        assert swept == [[1, 0, 1, 0], [0, 0, 0, 0]]
        money = money_of(fragile, user)
        (counted,) = [charged for charged in money.charged if charged != short]
        assert (len(money.charged), money.released) == (3, [])
        assert 66 < counted <= 66 * 2 + 66 * 480
        ended = await client.post("completions", json=longer, **keyed)
        assert code_of(ended) == (502, "engine_error")
        assert f"{counted:,} tokens were charged" in ended.json()["error"]["message"]
        assert money_of(fragile, user) == money


async def test_a_worker_that_dies_fails_what_it_had_and_a_new_one_serves(
    fragile: Stack, broker: Broker, user: StackUser
) -> None:
    async with fragile.async_client() as client:
        await until_served(client)
    async with fragile.async_client(user) as client:
        engine = engine_process(fragile)
        worker = psutil.Process(fragile.children["inference"].process.pid)
        before = counted(broker)
        asking = [asyncio.create_task(client.post("completions", json=PART)) for _ in range(3)]
        await until_counted(broker, before, requests=3)
        worker.kill()
        killed_at = time.monotonic()
        answers = await asyncio.gather(*asking)
        assert time.monotonic() - killed_at < SILENT_AFTER_SECONDS + 30
        assert {answer.status_code for answer in answers} <= {502, 503}
        assert (502, "engine_error") in map(code_of, answers)
        money = money_of(fragile, user)
        assert (len(money.charged), money.released) == (3, [])
        assert all(3 < charged < PART_HOLD for charged in money.charged)
        # The worker alone was killed; what it started has to notice by itself.
        await asyncio.to_thread(psutil.wait_procs, [engine], timeout=60)
        assert not engine.is_running()
        fragile.kill("inference")
        assert code_of(await client.post("completions", json=SHORT))[0] == 503
        await asyncio.to_thread(fragile.start, "inference")
        await until_served(client)
        assert not engine.is_running()


async def test_an_api_process_that_is_stopped_finishes_and_charges_what_it_has(
    fragile: Stack, user: StackUser, tmp_path: Path
) -> None:
    keyed: dict[str, Any] = {"headers": {"Idempotency-Key": "left"}}
    engine = engine_process(fragile)
    with second_api(fragile, tmp_path / "api.log") as url:
        async with fragile.async_client(user, base_url=url) as client:
            asking = asyncio.create_task(client.post("completions", json=SOME, **keyed))
            await asyncio.to_thread(fragile.wait_for, lambda: fragile.django(IS_HELD), part="api")
            await until_working(engine)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    # Its client is gone and it has stopped in order: the answer is there for the retry, and charged.
    money = money_of(fragile, user, seconds=0)
    async with fragile.async_client(user) as client:
        answer = await client.post("completions", json=SOME, **keyed)
    assert answer.status_code == 200
    assert money.charged == [answer.json()["usage"]["total_tokens"]]
    assert money_of(fragile, user) == money


async def test_a_worker_that_is_stopped_finishes_what_it_has(fragile: Stack, broker: Broker) -> None:
    async with fragile.async_client() as client:
        await until_served(client)
        engine = engine_process(fragile)
        process = fragile.children["inference"].process
        with broker.client() as connection:
            before = set(connection.keys(keys.published("*")))
            whole = [asyncio.create_task(client.post("completions", json=SOME)) for _ in range(3)]
            for _ in range(1000):
                if len(set(connection.keys(keys.published("*"))) - before) == 3:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("they were never published")
        # The worker takes them in order: once this one has begun, it has the others too.
        started = asyncio.Event()
        streaming = asyncio.create_task(read_stream(client, SOME, started))
        await started.wait()
        # As systemd and a terminal do it: to every process of the group.
        os.killpg(process.pid, signal.SIGTERM)
        lines = await streaming
        assert lines[-1] == "data: [DONE]"
        assert [answer.status_code for answer in await asyncio.gather(*whole)] == [200] * 3
        for _ in range(600):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        assert process.returncode == 0, fragile.log("inference")[-3000:]
        assert not engine.is_running()
        # A worker that was killed before leaves its row behind until it is silent; this one leaves none.
        left = "from inference.models import Engine; result = Engine.objects.filter(pid=pid).count()"
        assert fragile.django(left, pid=process.pid) == 0
        assert code_of(await client.post("completions", json=SHORT)) == (503, "model_unavailable")


def test_a_model_that_cannot_be_loaded_ends_the_command_with_an_error(fragile: Stack, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in fragile.tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    fragile.manage("addmodel", "broken", "--source", str(broken), "--dtype", "float32")
    (broken / "model.safetensors").write_bytes(b"not weights")
    child = fragile.spawn("inference", name="fragile-broken", model="broken")
    wait_for_refusal(child)
    left = "from inference.models import Engine; result = Engine.objects.filter(pid=pid).count()"
    assert fragile.django(left, pid=child.process.pid) == 0


def test_a_broker_that_is_too_old_ends_the_command_with_an_error(fragile: Stack, broker: Broker) -> None:
    broker.kill()
    broker.without = ["BLMPOP"]
    broker.start()
    child = fragile.spawn("inference", name="fragile-old-broker")
    wait_for_refusal(child)
    assert "Redis from 7.0 on" in child.log_text()


def wait_for_refusal(child: Child) -> None:
    for _ in range(6000):
        if child.process.poll() is not None:
            break
        time.sleep(0.1)
    assert child.process.returncode == 1
    assert "The engine refused to serve." in child.log_text()
