"""The bus over a real Valkey: what API processes and inference workers say to each other."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from acsinfra.core.courier import BrokerAway, Courier
from acsinfra.core.errors import ApiError, ErrorCode
from inference.bus import frames, keys
from inference.bus.api import LAST_COUNT_SECONDS, Bus
from inference.bus.envelope import publish
from inference.bus.frames import PIECE_BYTES, WINDOW_BYTES, Body, Cancel, Chunk, Control, Credit, End, Fault, Stopped
from inference.bus.replies import post_control
from inference.wire import CompletionWork, Sampling
from inference.worker import outbox
from inference.worker.control import ControlReader
from inference.worker.outbox import ClientStalled, Outboxes, Window
from tests.inference.broker import Broker

MODEL = "tiny"


async def always(model: str) -> bool:
    return True


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    yield bus
    await bus.close()


@pytest.fixture
async def courier(broker: Broker) -> AsyncIterator[Courier]:
    courier = Courier(broker.url)
    yield courier
    await courier.close()


def work(request_id: str, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> CompletionWork:
    return CompletionWork(
        **{
            "request_id": request_id,
            "model": MODEL,
            "served_model_name": "tiny",
            "created": 0,
            "deadline": time.time() + 60,
            "prompts": (prompt,),
            "prompt_texts": (None,),
            "sampling": Sampling(max_tokens=1, logit_bias={3: -1.5}),
            "hold_tokens": 3,
            **fields,
        }
    )


def outboxes(courier: Courier, *, worker: str = "worker-1", gone: list[str] | None = None) -> Outboxes:
    return Outboxes(courier=courier, worker=worker, on_gone=(gone if gone is not None else []).append)


async def until(is_true: Any, *, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# The message


async def test_no_value_of_a_large_work_is_large(broker: Broker, courier: Courier) -> None:
    await publish(work("req_heavy", prompt=tuple(range(200_000))), reply_to="api-1", courier=courier)
    pieces = await courier.ask("HVALS", keys.pieces("req_heavy"))
    assert isinstance(pieces, list)
    assert len(pieces) > 3
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert int(str(await courier.ask("TTL", keys.pieces("req_heavy")))) > 0
    await courier.ask("DEL", keys.queue(MODEL))


# Answers


async def test_answers_reach_the_request_they_belong_to(bus: Bus, courier: Courier) -> None:
    first, second = await bus.send(work("req_a")), await bus.send(work("req_b"))
    boxes = outboxes(courier)
    boxes.put(bus.process, Body("req_b", 1, b"b"))
    boxes.put(bus.process, Body("req_a", 1, b"a"))
    boxes.put(bus.process, End("req_a", 2, 1))
    assert await first.next() == Body("req_a", 1, b"a")
    assert await first.next() == End("req_a", 2, 1)
    assert await second.next() == Body("req_b", 1, b"b")


async def test_a_batch_that_is_sent_twice_is_read_once(bus: Bus, courier: Courier) -> None:
    inbox = await bus.send(work("req_twice"))
    batch = frames.encode_batch(frames.Batch("w", 1, [Chunk("req_twice", b"1")]))
    for _ in range(2):
        await courier.ask("XADD", keys.replies(bus.process), "*", "batch", batch)
    later = frames.encode_batch(frames.Batch("w", 2, [Chunk("req_twice", b"2")]))
    await courier.ask("XADD", keys.replies(bus.process), "*", "batch", later)
    assert [await inbox.next(), await inbox.next()] == [Chunk("req_twice", b"1"), Chunk("req_twice", b"2")]


async def test_what_a_second_worker_makes_of_the_same_request_is_not_read(bus: Bus, courier: Courier) -> None:
    inbox = await bus.send(work("req_doubled"))
    one, other = outboxes(courier, worker="w1"), outboxes(courier, worker="w2")
    one.put(bus.process, Chunk("req_doubled", b"1"))
    await until(lambda: inbox.worker == "w1")
    other.put(bus.process, Chunk("req_doubled", b"x"))
    await other.drain(within=5)
    one.put(bus.process, Chunk("req_doubled", b"2"))
    assert [await inbox.next(), await inbox.next()] == [Chunk("req_doubled", b"1"), Chunk("req_doubled", b"2")]


async def test_what_was_read_leaves_redis(bus: Bus, courier: Courier) -> None:
    inbox = await bus.send(work("req_trim"))
    boxes = outboxes(courier)
    for number in range(50):
        boxes.put(bus.process, Chunk("req_trim", b"%d" % number))
        assert await inbox.next() == Chunk("req_trim", b"%d" % number)
    await asyncio.sleep(0.05)
    # The last entry read is trimmed with the next read.
    assert int(str(await courier.ask("XLEN", keys.replies(bus.process)))) <= 1
    assert 0 < int(str(await courier.ask("PTTL", keys.replies(bus.process)))) <= 30_000


async def test_a_slow_reader_holds_the_worker_back_and_nothing_piles_up(
    broker: Broker, bus: Bus, courier: Courier
) -> None:
    inbox = await bus.send(work("req_slow"))
    boxes, window = outboxes(courier), Window()

    def credit(message: Control) -> None:
        if isinstance(message, Credit):
            window.credit(message.read)

    control = ControlReader(url=broker.url, model=MODEL, on_message=credit)
    await control.listening.wait()
    # However long the test takes, the worker lives.
    await courier.ask("SET", keys.worker("worker-1"), "1")
    body = bytes(range(256)) * (32 * 1024 * 1024 // 256)
    sending = asyncio.create_task(boxes.send_body(bus.process, "req_slow", body, window))
    with broker.client() as client:
        await asyncio.sleep(1.0)
        unread = sum(len(frame.data) for frame in inbox._frames if isinstance(frame, Body))
        assert unread <= WINDOW_BYTES
        assert not sending.done()
        used = client.info("memory")["used_memory"]
        received = bytearray()
        while len(received) < len(body):
            frame = await inbox.next()
            assert isinstance(frame, Body)
            assert frame.total == len(body)
            assert len(frame.data) <= PIECE_BYTES
            received += frame.data
            assert client.info("memory")["used_memory"] < used + 4 * WINDOW_BYTES
    await sending
    assert received == body
    await control.close()


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "STALLED_SECONDS", 0.1)
    window = Window()
    await window.take(WINDOW_BYTES)
    with pytest.raises(ClientStalled):
        await window.take(1)


async def test_a_worker_hears_of_an_api_process_that_is_gone(broker: Broker, courier: Courier) -> None:
    gone: list[str] = []
    boxes = outboxes(courier, gone=gone)
    boxes.put("no-such-process", Chunk("req_x", b"1"))
    await until(lambda: gone == ["no-such-process"])
    assert await courier.ask("EXISTS", keys.replies("no-such-process")) == 0


async def test_a_worker_looks_after_the_processes_that_wait_for_it(
    broker: Broker, courier: Courier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "GONE_AFTER_SECONDS", 0.3)
    gone: list[str] = []
    boxes = outboxes(courier, gone=gone)
    await courier.ask("SET", keys.alive("lives"), "1")
    watch = asyncio.create_task(boxes.watch(lambda: {"lives", "died"}))
    await until(lambda: gone)
    watch.cancel()
    assert set(gone) == {"died"}


# Control


async def test_workers_hear_cancels_and_credits_from_their_start_on(broker: Broker, bus: Bus, courier: Courier) -> None:
    post_control(courier, "other", Cancel("req_before"))
    await courier.ask("PING")
    heard: list[Control] = []
    control = ControlReader(url=broker.url, model="other", on_message=heard.append)
    await control.listening.wait()
    post_control(courier, "other", Credit("req_1", 700))
    post_control(courier, "other", Cancel("req_2"))
    await until(lambda: len(heard) == 2)
    assert heard == [Credit("req_1", 700), Cancel("req_2")]
    await control.close()


async def test_giving_up_a_request_leaves_word_and_a_mark(broker: Broker, bus: Bus, courier: Courier) -> None:
    heard: list[Control] = []
    control = ControlReader(url=broker.url, model=MODEL, on_message=heard.append)
    await control.listening.wait()
    inbox = await bus.send(work("req_left"))
    over = await bus.send(work("req_over"))
    bus.close_inbox(inbox, is_over=False)
    bus.close_inbox(inbox, is_over=False)
    bus.close_inbox(over, is_over=True)
    await until(lambda: heard)
    await asyncio.sleep(0.1)
    assert heard == [Cancel("req_left")]
    assert await courier.ask("EXISTS", keys.cancelled("req_left")) == 1
    assert await courier.ask("EXISTS", keys.cancelled("req_over")) == 0
    assert bus.waiting == 0
    await control.close()


async def test_a_request_that_is_stopped_in_its_queue_is_out_of_it_and_counts_nothing(
    bus: Bus, courier: Courier
) -> None:
    await courier.ask("DEL", keys.queue(MODEL))
    large = work("req_large_waiting", prompt=tuple(range(100_000)))
    waiting, other = await bus.send(large), await bus.send(work("req_other"))
    started = time.monotonic()
    assert await bus.stop(waiting) == (0, 0)
    assert time.monotonic() - started < LAST_COUNT_SECONDS
    assert bus.waiting == 1
    assert await courier.ask("LLEN", keys.queue(MODEL)) == 1
    assert await courier.ask("EXISTS", keys.pieces(large.request_id)) == 0
    # One that a worker has is stopped there.
    await courier.ask("DEL", keys.queue(MODEL))
    stopping = asyncio.create_task(bus.stop(other))
    async with asyncio.timeout(30):
        while await courier.ask("EXISTS", keys.cancelled("req_other")) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    outboxes(courier).put(bus.process, Stopped("req_other", 2, 1))
    assert await stopping == (2, 1)


# The watch


async def test_requests_of_a_worker_that_went_silent_end(
    broker: Broker, bus: Bus, courier: Courier, settings: Any
) -> None:
    settings.HEARTBEAT = timedelta(seconds=0.1)
    await courier.ask("SET", keys.worker("w-lives"), "1")
    await courier.ask("SET", keys.worker("w-dies"), "1", "PX", 500)
    dying, living = await bus.send(work("req_dying")), await bus.send(work("req_living"))
    for worker, inbox in (("w-dies", dying), ("w-lives", living)):
        outboxes(courier, worker=worker).put(bus.process, frames.Taken(inbox.request_id, worker))
    async with asyncio.timeout(30):
        fault = await dying.next()
    assert isinstance(fault, Fault)
    assert fault.error().status == 502
    assert living.worker == "w-lives"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await living.next()


async def test_a_redis_that_lost_its_data_while_connected_is_no_worker_that_died(
    broker: Broker, bus: Bus, courier: Courier, settings: Any
) -> None:
    # It gets twice as long to say again that it lives: longer than the test may take on any machine.
    settings.HEARTBEAT = timedelta(seconds=20)
    await courier.ask("SET", keys.worker("w-lives"), "1")
    inbox = await bus.send(work("req_flushed"))
    outboxes(courier, worker="w-lives").put(bus.process, Chunk(inbox.request_id, b"first"))
    assert isinstance(await inbox.next(), Chunk)
    bus._courier.connected_at = bus._reader.connected_at = time.monotonic() - 60
    with broker.client() as client:
        client.flushall()
    await asyncio.sleep(2.5)
    assert inbox.next_nowait() is None
    await until(lambda: bus._emptied_at > 0)
    await courier.ask("SET", keys.worker("w-lives"), "1")
    # That time is over.
    bus._emptied_at -= 60
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await inbox.next()


async def test_requests_that_nobody_takes_end_when_no_engine_is_left(broker: Broker) -> None:
    served = True

    async def is_served(model: str) -> bool:
        return served

    bus = Bus(url=broker.url, is_served=is_served)
    await bus.ready()
    inbox = await bus.send(work("req_untaken"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.5):
            await inbox.next()
    served = False
    async with asyncio.timeout(30):
        fault = await inbox.next()
    assert isinstance(fault, Fault)
    assert fault.error().code is ErrorCode.MODEL_UNAVAILABLE
    await bus.close()


# Redis


async def test_any_number_of_waiting_requests_costs_two_connections(broker: Broker, bus: Bus) -> None:
    await until(lambda: bus._reader.connection.is_connected)
    with broker.client() as client:
        before = len(client.client_list())
        inboxes = await asyncio.gather(*(bus.send(work(f"req_many_{number}")) for number in range(500)))
        assert len(client.client_list()) == before
        client.delete(keys.queue(MODEL))
    for inbox in inboxes:
        bus.close_inbox(inbox, is_over=True)


async def test_a_broker_that_dies_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    courier = Courier(broker.url)
    boxes = outboxes(courier)
    inbox = await bus.send(work("req_before"))
    boxes.put(bus.process, Chunk("req_before", b"0"))
    assert await inbox.next() == Chunk("req_before", b"0")
    # What is in its file by then outlives it.
    with broker.client() as client:
        await until(lambda: client.info("persistence")["aof_buffer_length"] == 0)
    await asyncio.to_thread(broker.kill)
    meanwhile = asyncio.create_task(bus.send(work("req_meanwhile")))
    for number in range(1, 20):
        boxes.put(bus.process, Chunk("req_before", b"%d" % number))
        await asyncio.sleep(0.02)
    await asyncio.to_thread(broker.start)
    async with asyncio.timeout(30):
        received = [await inbox.next() for _ in range(1, 20)]
        other = await meanwhile
    assert received == [Chunk("req_before", b"%d" % number) for number in range(1, 20)]
    with broker.client() as client:
        assert client.llen(keys.queue(MODEL)) == 2
    boxes.put(bus.process, End("req_meanwhile", 1, 1))
    async with asyncio.timeout(30):
        assert await other.next() == End("req_meanwhile", 1, 1)
    await bus.close()
    await courier.close()
    broker.kill()


async def test_a_reply_stream_that_redis_lost_comes_back(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    gone: list[str] = []
    courier = Courier(broker.url)
    boxes = outboxes(courier, gone=gone)
    inbox = await bus.send(work("req_lost"))
    await asyncio.to_thread(broker.kill)
    for file in (tmp_path / "appendonlydir").iterdir():
        file.unlink()
    await asyncio.to_thread(broker.start)
    boxes.put(bus.process, End("req_lost", 1, 1))
    async with asyncio.timeout(30):
        assert await inbox.next() == End("req_lost", 1, 1)
    assert gone == []
    await bus.close()
    await courier.close()
    broker.kill()


async def test_a_broker_that_stays_away_is_reported(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    courier = Courier(broker.url)
    started = time.monotonic()
    with pytest.raises(BrokerAway):
        await courier.ask("PING", patience=0.5)
    assert time.monotonic() - started < 3
    broker.start()
    assert await courier.ask("PING") == b"PONG"
    await courier.close()
    broker.kill()


async def test_a_closed_bus_leaves_nothing_in_redis(broker: Broker, courier: Courier) -> None:
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    assert await courier.ask("EXISTS", keys.alive(bus.process), keys.replies(bus.process)) == 2
    await bus.close()
    assert await courier.ask("EXISTS", keys.alive(bus.process), keys.replies(bus.process)) == 0


async def test_what_redis_refuses_is_raised(courier: Courier) -> None:
    await courier.ask("SET", "text", "x")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await courier.ask("LPUSH", "text", "y")
    assert await courier.ask("GET", "text") == b"x"


def test_a_fault_is_an_api_error() -> None:
    error = Fault("req", "engine_timeout", "Too late.").error()
    assert isinstance(error, ApiError)
    assert (error.status, error.message) == (504, "Too late.")
