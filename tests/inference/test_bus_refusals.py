"""A Redis that refuses every write for a while, as one whose disk is full does: nothing stops for good or leaks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from redis.exceptions import ResponseError

from acsinfra.core.courier import BrokerAway, Courier
from acsinfra.core.errors import ErrorCode, api_error_of
from inference.bus import keys
from inference.bus.api import Bus
from inference.bus.frames import Cancel, Chunk, Control
from inference.bus.places import Place
from inference.bus.replies import post_control
from inference.worker.control import ControlReader
from tests.inference.broker import Broker
from tests.inference.test_bus import MODEL, always, outboxes, until, work

USER = "key-1"


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    yield bus
    await bus.close()


@contextmanager
def refusing(broker: Broker) -> Iterator[None]:
    """Have the broker refuse writes: it asks for a replica, and has none."""
    with broker.client() as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


async def claim(bus: Bus, request_id: str) -> Place:
    place = await bus.places.claim(key=USER, request_id=request_id, at_once=1, queued=1)
    await asyncio.wait_for(place.granted, 30)
    return place


async def test_answers_arrive_after_the_broker_refused_to_trim_what_was_read(broker: Broker, bus: Bus) -> None:
    courier = Courier(broker.url)
    inbox = await bus.send(work("req_refused"))
    boxes = outboxes(courier)
    boxes.put(bus.process, Chunk("req_refused", b"1"))
    assert await inbox.next() == Chunk("req_refused", b"1")
    with refusing(broker):
        await until(lambda: not bus._reader.connection.is_connected)
    boxes.put(bus.process, Chunk("req_refused", b"2"))
    assert await asyncio.wait_for(inbox.next(), 30) == Chunk("req_refused", b"2")
    await courier.close()


async def test_a_place_that_could_not_be_given_back_is_given_back_later(broker: Broker, bus: Bus) -> None:
    first = await claim(bus, "req_first")
    with refusing(broker):
        bus.places.release(first)
        await until(lambda: bool(bus.places._refused))
    bus.places.release(await claim(bus, "req_second"))


async def test_an_entry_that_cannot_be_read_is_passed_over(broker: Broker, bus: Bus) -> None:
    courier = Courier(broker.url)
    heard: list[Control] = []
    control = ControlReader(url=broker.url, model=MODEL, on_message=heard.append)
    await control.listening.wait()
    await courier.ask("XADD", keys.control(MODEL), "*", "c", b"\xc1")
    post_control(courier, MODEL, Cancel("req_after"))
    await until(lambda: heard == [Cancel("req_after")])
    await control.close()
    inbox = await bus.send(work("req_after"))
    await courier.ask("XADD", keys.replies(bus.process), "*", "batch", b"\xc1")
    outboxes(courier).put(bus.process, Chunk("req_after", b"1"))
    assert await asyncio.wait_for(inbox.next(), 30) == Chunk("req_after", b"1")
    await courier.close()


async def test_a_request_that_the_broker_refuses_is_told_to_come_again(broker: Broker, bus: Bus) -> None:
    with refusing(broker), pytest.raises(ResponseError) as refusal:
        await bus.send(work("req_unsent"))
    assert api_error_of(refusal.value).code is ErrorCode.SERVICE_UNAVAILABLE
    assert bus.waiting == 0


async def test_a_broker_that_refuses_the_url_s_database_counts_as_away(broker: Broker) -> None:
    courier = Courier(broker.url.removesuffix("/0") + "/99")
    with pytest.raises(BrokerAway):
        await courier.ask("PING", patience=0.1)
    with pytest.raises(BrokerAway):
        await courier.ask("PING", patience=0.1)
    await courier.close()
