"""How a worker takes Completions from its model's queue, over a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from acsinfra.core.courier import Courier
from inference.bus import keys
from inference.bus.envelope import Envelope, publish, read_work
from inference.engine.errors import EngineRefused
from inference.worker.intake import Intake, refuse_old_broker
from tests.inference.broker import Broker
from tests.inference.test_bus import MODEL, until, work


@pytest.fixture
async def courier(broker: Broker) -> AsyncIterator[Courier]:
    courier = Courier(broker.url)
    yield courier
    await courier.close()


class Taker:
    """A worker's intake that keeps what it gets; it has room for `room` requests at once."""

    def __init__(self, url: str, *, room: int = 1000) -> None:
        self.room = room
        self.envelopes: list[Envelope] = []
        self.intake = Intake(
            url=url, model=MODEL, room=lambda: self.room - len(self.envelopes), on_envelope=self.envelopes.append
        )

    def ids(self) -> list[str]:
        return [envelope.request_id for envelope in self.envelopes]


async def test_a_worker_takes_what_was_published_in_order(broker: Broker, courier: Courier) -> None:
    small, large, last = work("req_small"), work("req_large", prompt=tuple(range(100_000))), work("req_last")
    await publish(small, reply_to="api-1", courier=courier)
    await publish(large, reply_to="api-1", courier=courier)
    # A publish that is tried again after a lost connection arrives once.
    await publish(small, reply_to="api-1", courier=courier)
    taker = Taker(broker.url)
    await until(lambda: len(taker.envelopes) == 2)
    await publish(last, reply_to="api-1", courier=courier)
    await until(lambda: len(taker.envelopes) == 3)
    assert taker.ids() == ["req_small", "req_large", "req_last"]
    assert {envelope.reply_to for envelope in taker.envelopes} == {"api-1"}
    assert taker.envelopes[0].pieces == 0
    assert taker.envelopes[1].pieces > 1
    assert await read_work(taker.envelopes[0], courier) == small
    assert await read_work(taker.envelopes[1], courier) == large
    assert await courier.ask("EXISTS", keys.pieces("req_large")) == 0
    assert await read_work(taker.envelopes[1], courier) is None
    await taker.intake.stop(courier)


async def test_a_worker_takes_no_more_than_it_has_room_for(broker: Broker, courier: Courier) -> None:
    for number in range(40):
        await publish(work(f"req_room_{number}"), reply_to="api-1", courier=courier)
    taker = Taker(broker.url, room=3)
    await until(lambda: len(taker.envelopes) == 3)
    await asyncio.sleep(0.1)
    assert await courier.ask("LLEN", keys.queue(MODEL)) == 37
    del taker.envelopes[0]
    taker.intake.note_room()
    await until(lambda: len(taker.envelopes) == 3)
    # Two that come to a long queue share it.
    taker.room, other = 40, Taker(broker.url)
    taker.intake.note_room()
    await until(lambda: len(taker.envelopes) + len(other.envelopes) == 39)
    await asyncio.gather(taker.intake.stop(courier), other.intake.stop(courier))


async def test_a_worker_that_stops_takes_nothing_more(broker: Broker, courier: Courier) -> None:
    taker = Taker(broker.url)
    await publish(work("req_first"), reply_to="api-1", courier=courier)
    await until(lambda: taker.ids() == ["req_first"])
    # It waits in Redis for the next, or has no room and waits for that.
    await taker.intake.stop(courier)
    full = Taker(broker.url, room=0)
    await asyncio.sleep(0.1)
    await full.intake.stop(courier)
    await publish(work("req_second"), reply_to="api-1", courier=courier)
    assert (taker.ids(), full.ids()) == (["req_first"], [])
    assert await courier.ask("LLEN", keys.queue(MODEL)) == 1
    await courier.ask("DEL", keys.queue(MODEL))


async def test_a_message_that_cannot_be_read_is_passed_over(broker: Broker, courier: Courier) -> None:
    for message in (b"", b"\xff", b"null", b"[]", b'{"body": "of another version"}'):
        await courier.ask("LPUSH", keys.queue(MODEL), message)
    await publish(work("req_readable"), reply_to="api-1", courier=courier)
    taker = Taker(broker.url)
    await until(lambda: taker.ids() == ["req_readable"])
    await taker.intake.stop(courier)


async def test_a_worker_waits_for_a_broker_that_is_away(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    courier, taker = Courier(broker.url), Taker(broker.url)
    await courier.ask("PING")
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)
    await publish(work("req_after"), reply_to="api-1", courier=courier)
    await until(lambda: taker.ids() == ["req_after"])
    await asyncio.to_thread(broker.kill)
    # One that stops meanwhile does not wait for it.
    async with asyncio.timeout(30):
        await taker.intake.stop(courier)
    await courier.close()


async def test_an_intake_that_a_silent_broker_holds_is_stopped_by_both_who_ask(
    broker: Broker, courier: Courier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr("inference.worker.intake.BLOCK_MS", 100)
    async with await asyncio.start_server(say_nothing, "127.0.0.1") as silent:
        taker = Taker(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0")
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            await asyncio.gather(taker.intake.stop(courier), taker.intake.stop(courier))


async def test_a_broker_that_lacks_the_intakes_command_is_refused(
    broker: Broker, courier: Courier, tmp_path: Path
) -> None:
    await refuse_old_broker(courier)
    old = Broker(tmp_path, without=["BLMPOP"])
    old.start()
    courier_of_old = Courier(old.url)
    try:
        with pytest.raises(EngineRefused, match="BLMPOP"):
            await refuse_old_broker(courier_of_old)
    finally:
        await courier_of_old.close()
        old.kill()


async def test_a_broker_that_does_not_say_what_it_knows_passes(tmp_path: Path) -> None:
    silent = Broker(tmp_path, without=["COMMAND"])
    silent.start()
    courier = Courier(silent.url)
    try:
        await refuse_old_broker(courier)
    finally:
        await courier.close()
        silent.kill()
