"""The places of a key, decided by Redis for all API processes at once."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from acsinfra.core.courier import Courier
from acsinfra.core.errors import ApiError, ErrorCode
from inference.bus import keys
from inference.bus.api import Bus
from inference.bus.places import Place
from tests.inference.broker import Broker


async def always(model: str) -> bool:
    return True


@pytest.fixture
async def buses(broker: Broker) -> AsyncIterator[list[Bus]]:
    """Return two API processes."""
    buses = [Bus(url=broker.url, is_served=always) for _ in range(2)]
    for bus in buses:
        await bus.ready()
    yield buses
    for bus in buses:
        await bus.close()


async def claim(bus: Bus, key: str, name: str, *, at_once: int = 2, queued: int = 3) -> Place:
    return await bus.places.claim(key=key, request_id=name, at_once=at_once, queued=queued)


async def settle(place: Place, *, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        await place.granted


async def test_so_many_run_so_many_wait_and_the_next_is_refused(buses: list[Bus]) -> None:
    places = [await claim(buses[number % 2], "full", f"r{number}") for number in range(5)]
    assert [place.granted.done() for place in places] == [True, True, False, False, False]
    for bus in buses:
        with pytest.raises(ApiError) as refusal:
            await claim(bus, "full", "one too many")
        assert refusal.value.code is ErrorCode.QUEUE_FULL
        assert refusal.value.status == 429
        assert int(refusal.value.headers["Retry-After"]) >= 1
    other = await claim(buses[0], "another key", "r0")
    assert other.granted.done()
    for bus, place in zip(buses * 3, [*places, other], strict=False):
        bus.places.release(place)


async def test_places_go_by_order_of_arrival_across_processes(buses: list[Bus]) -> None:
    places = [await claim(buses[number % 2], "order", f"r{number}", at_once=1, queued=9) for number in range(6)]
    for number, place in enumerate(places):
        await settle(place)
        assert not any(later.granted.done() for later in places[number + 1 :])
        buses[number % 2].places.release(place)


async def test_who_leaves_the_line_lets_the_next_move_up(buses: list[Bus]) -> None:
    first, second, third = [await claim(buses[0], "left", f"r{number}", at_once=1) for number in range(3)]
    buses[0].places.release(second)
    buses[0].places.release(first)
    await settle(third)
    assert not second.granted.done()
    buses[0].places.release(third)


async def test_a_claim_that_is_cancelled_leaves_the_line(buses: list[Bus], broker: Broker) -> None:
    task = asyncio.create_task(claim(buses[0], "cancelled", "r0", at_once=1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    place = await claim(buses[1], "cancelled", "r1", at_once=1)
    await settle(place)
    buses[1].places.release(place)


async def test_the_places_of_a_process_that_died_are_free_again(buses: list[Bus], broker: Broker) -> None:
    held = [await claim(buses[0], "died", f"held{number}", queued=9) for number in range(2)]
    line = [await claim(buses[0], "died", "waits with it", queued=9)]
    place = await claim(buses[1], "died", "lives", queued=9)
    assert not place.granted.done()
    # As after kill -9: its reader and watch stop, and nothing says any more that it lives.
    buses[0]._watch.cancel()
    # What it was about to say has been said.
    await buses[0]._courier.ask("PING")
    courier = Courier(broker.url)
    await courier.ask("DEL", keys.alive(buses[0].process))
    await settle(place)
    assert not line[0].granted.done()
    after = await claim(buses[1], "died", "after", queued=9)
    assert after.granted.done()
    assert len(held) == 2
    await courier.close()


async def test_a_word_that_was_lost_is_asked_for_again(buses: list[Bus], broker: Broker) -> None:
    first = await claim(buses[0], "word", "first", at_once=1)
    second = await claim(buses[1], "word", "second", at_once=1)
    courier = Courier(broker.url)
    # Redis lost the line: the one that waits gets into it again, and has its turn.
    await courier.ask("DEL", "acs:places:word:waiting")
    buses[0].places.release(first)
    await settle(second)
    buses[1].places.release(second)
    await courier.close()


async def test_nothing_is_left_when_all_have_gone(buses: list[Bus], broker: Broker) -> None:
    places = [await claim(buses[0], "gone", f"r{number}") for number in range(4)]
    for place in places:
        buses[0].places.release(place)
    await buses[0]._courier.ask("PING")
    with broker.client() as client:
        assert client.exists("acs:places:gone:running", "acs:places:gone:waiting") == 0


async def test_thousands_in_line_do_not_slow_each_other(buses: list[Bus]) -> None:
    started = time.monotonic()
    places = [await claim(buses[0], "crowd", "r0", at_once=500, queued=5000)]
    places += await asyncio.gather(
        *(claim(buses[number % 2], "crowd", f"r{number}", at_once=500, queued=5000) for number in range(1, 2500))
    )
    for number, place in enumerate(places):
        await settle(place)
        buses[number % 2].places.release(place)
    # Looking at every member for each that comes and goes took minutes.
    assert time.monotonic() - started < 30
