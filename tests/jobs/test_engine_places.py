"""Places for Jobs' sequences in an engine: in turn, never too many, and none lost to a Job that goes away."""

import asyncio
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.engine_places import EnginePlaces


def test_one_of_eight_places_stays_free_of_jobs() -> None:
    assert [EnginePlaces(n).total for n in (1, 2, 7, 8, 64, 256)] == [1, 2, 7, 7, 56, 224]


async def test_the_job_that_was_claimed_first_has_every_place_that_gets_free() -> None:
    places = EnginePlaces(2)
    began: list[str] = []
    may_end = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "b2", "c1")}

    async def prompt(name: str, turn: int) -> None:
        async with places.taken(1, turn=turn):
            began.append(name)
            await may_end[name].wait()

    async with asyncio.TaskGroup() as group:
        # The last claimed asks first.
        for name in ("c1", "b1", "b2", "a1", "a2", "a3"):
            group.create_task(prompt(name, ord(name[0])))
            await asyncio.sleep(0)
        assert began == ["c1", "b1"]
        for name in ("b1", "c1", "a1", "a2", "a3", "b2"):
            may_end[name].set()
            await asyncio.sleep(0.01)
    assert began == ["c1", "b1", "a1", "a2", "a3", "b2"]


async def test_what_is_larger_than_the_engine_has_it_alone() -> None:
    places = EnginePlaces(3)
    small = asyncio.Event()
    began: list[str] = []

    async def prompt(name: str, sequences: int, turn: int, may_end: asyncio.Event | None = None) -> None:
        async with places.taken(sequences, turn=turn):
            began.append(name)
            if may_end is not None:
                await may_end.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(prompt("small", 1, 0, small))
        await asyncio.sleep(0)
        group.create_task(prompt("large", 16, 1))
        # It would fit, and does not overtake: the large one would never have its turn.
        group.create_task(prompt("later", 1, 2))
        await asyncio.sleep(0.01)
        assert began == ["small"]
        small.set()
    assert began == ["small", "large", "later"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=20))
def test_whoever_is_cancelled_and_whenever_no_place_is_lost(asked: list[tuple[int, int, int]]) -> None:
    async def run() -> None:
        places = EnginePlaces(4)
        inside = 0

        async def prompt(sequences: int, turn: int) -> None:
            nonlocal inside
            async with places.taken(sequences, turn=turn):
                inside += min(sequences, places.total)
                assert inside <= places.total
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= min(sequences, places.total)

        tasks = []
        for sequences, turn, steps in asked:
            tasks.append(asyncio.create_task(prompt(sequences, turn)))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 2:
                tasks[len(tasks) // 2].cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        async with asyncio.timeout(10), places.taken(places.total, turn=9):
            assert inside == 0

    asyncio.run(run())
