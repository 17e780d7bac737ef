"""Messages that are lost before a worker has said that it has them: sent again, once each, in their order."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from acsinfra.core.courier import Courier
from inference.bus import keys
from inference.bus.api import Bus
from inference.bus.envelope import Envelope, decode_envelope, read_work, send_again
from inference.bus.frames import Cancel, Control, End, Taken
from inference.bus.lost import send_lost_again
from inference.bus.replies import Inbox
from inference.worker.control import ControlReader
from tests.inference.broker import Broker
from tests.inference.test_bus import MODEL, always, outboxes, until, work

QUEUE = keys.queue(MODEL)
NEVER = 86_400.0


class Watch:
    """The bus's watch. What is missing counts as lost while `looking` only, and then at once, whatever its age.

    By their age some of a test's messages would be looked for before the others, or one that the test has in hand.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._looks = 0
        self._count_lost_after(NEVER)
        monkeypatch.setattr("inference.bus.api.WATCH_EVERY_SECONDS", 0.02)
        monkeypatch.setattr("inference.bus.api.send_lost_again", self._look)

    async def _look(self, inboxes: Mapping[str, Inbox], *, courier: Courier, connected_at: float) -> None:
        await send_lost_again(inboxes, courier=courier, connected_at=connected_at)
        self._looks += 1

    def _count_lost_after(self, seconds: float) -> None:
        self._monkeypatch.setattr("inference.bus.lost.LOST_AFTER_SECONDS", seconds)

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Let it look; at the block's end it has looked several times, and is at it no more."""
        self._count_lost_after(0.0)
        yield
        await self._looks_more(3)
        self._count_lost_after(NEVER)
        await self._looks_more(1)

    async def _looks_more(self, times: int) -> None:
        wanted = self._looks + times
        await until(lambda: self._looks >= wanted)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
async def bus(broker: Broker, watch: Watch) -> AsyncIterator[Bus]:
    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    yield bus
    await bus.close()


@pytest.fixture
async def courier(broker: Broker) -> AsyncIterator[Courier]:
    courier = Courier(broker.url)
    await courier.ask("DEL", QUEUE)
    yield courier
    await courier.close()


async def in_line(courier: Courier) -> list[bytes]:
    """The queue's messages, the next one first."""
    messages = await courier.ask("LRANGE", QUEUE, 0, -1)
    assert isinstance(messages, list)
    return messages[::-1]


async def until_in_line(courier: Courier, messages: list[bytes]) -> None:
    async with asyncio.timeout(30):
        while await in_line(courier) != messages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def take(courier: Courier) -> Envelope:
    popped: Any = await courier.ask("RPOP", QUEUE)
    return decode_envelope(popped)


async def answered(inbox: Inbox) -> bool:
    async with asyncio.timeout(30):
        return isinstance(await inbox.next(), End)


async def test_a_queue_that_redis_lost_is_sent_again_in_order_and_answered(
    bus: Bus, courier: Courier, watch: Watch
) -> None:
    inboxes = [await bus.send(work(f"req_lost_{number}")) for number in range(5)]
    messages = await in_line(courier)
    await courier.ask("DEL", QUEUE, keys.published("req_lost_3"))
    async with watch.looking():
        await until_in_line(courier, messages)
    assert await in_line(courier) == messages
    boxes = outboxes(courier)
    for inbox in inboxes:
        envelope = await take(courier)
        assert await read_work(envelope, courier) == inbox.posted.work  # type: ignore[union-attr]
        boxes.put(bus.process, End(envelope.request_id, 2, 1))
    assert all([await answered(inbox) for inbox in inboxes])


async def test_what_a_worker_died_with_is_sent_again_and_taken_next(bus: Bus, courier: Courier, watch: Watch) -> None:
    taken, *_ = [await bus.send(work(f"req_popped_{number}")) for number in range(5)]
    messages = await in_line(courier)
    await courier.ask("RPOP", QUEUE, 3)
    # Of the first, the worker has still said that it has it.
    outboxes(courier).put(bus.process, Taken(taken.request_id, "worker-1"))
    await until(lambda: taken.worker == "worker-1")
    async with watch.looking():
        await until_in_line(courier, messages[1:])
    assert await in_line(courier) == messages[1:]


async def test_what_waits_in_a_long_line_is_not_sent_again(bus: Bus, courier: Courier, watch: Watch) -> None:
    inboxes = [await bus.send(work(f"req_patient_{number}")) for number in range(50)]
    messages = await in_line(courier)
    async with watch.looking():
        pass
    assert await in_line(courier) == messages
    assert {inbox.sendings for inbox in inboxes} == {1}


async def test_large_work_is_sent_again_with_its_pieces(bus: Bus, courier: Courier, watch: Watch) -> None:
    large = work("req_large_lost", prompt=tuple(range(100_000)))
    await bus.send(large)
    messages = await in_line(courier)
    # A worker had begun to read it.
    await courier.ask("DEL", QUEUE, keys.pieces(large.request_id))
    async with watch.looking():
        await until_in_line(courier, messages)
    envelope = await take(courier)
    assert envelope.pieces > 1
    assert await read_work(envelope, courier) == large


async def test_what_nobody_waits_for_is_not_sent_again(
    bus: Bus, courier: Courier, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.bus.api.LAST_COUNT_SECONDS", 0.5)
    given_up, stopped, over = [await bus.send(work(f"req_{name}")) for name in ("given_up", "stopped", "over")]
    await courier.ask("DEL", QUEUE)
    bus.close_inbox(given_up, is_over=False)
    bus.close_inbox(over, is_over=True)
    # It waits for the count of whoever might have it.
    stopping = asyncio.create_task(bus.stop(stopped))
    await asyncio.sleep(0)
    async with watch.looking():
        assert await stopping is None
    assert await in_line(courier) == []


async def test_a_sending_that_is_tried_again_after_a_lost_connection_arrives_once(bus: Bus, courier: Courier) -> None:
    inbox = await bus.send(work("req_again"))
    assert inbox.posted is not None
    await courier.ask("DEL", QUEUE)
    assert await send_again(inbox.posted, sending=2, courier=courier)
    await take(courier)
    # The courier lost its connection before the answer: it counts as sent, and a worker has it.
    assert await send_again(inbox.posted, sending=2, courier=courier)
    assert await in_line(courier) == []
    assert await send_again(inbox.posted, sending=3, courier=courier)
    assert not await send_again(inbox.posted, sending=4, courier=courier)
    assert len(await in_line(courier)) == 1


async def test_the_second_of_two_that_have_a_request_is_stopped_at_its_end(
    broker: Broker, bus: Bus, courier: Courier, watch: Watch
) -> None:
    heard: list[Control] = []
    control = ControlReader(url=broker.url, model=MODEL, on_message=heard.append)
    await control.listening.wait()
    inbox = await bus.send(work("req_both"))
    await take(courier)
    async with watch.looking():
        await until(lambda: inbox.sendings == 2)
    one, other = outboxes(courier, worker="w1"), outboxes(courier, worker="w2")
    # The first had it all along, and its word was lost.
    one.put(bus.process, Taken("req_both", "w1"))
    await until(lambda: inbox.worker == "w1")
    other.put(bus.process, Taken("req_both", "w2"))
    one.put(bus.process, End("req_both", 2, 1))
    assert await answered(inbox)
    assert heard == []
    bus.close_inbox(inbox, is_over=True)
    await until(lambda: heard == [Cancel("req_both")])
    await control.close()
