"""A chaos run: real traffic, kill -9 at random points, and then every promise checked."""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.chaos.parts import Parts
from tests.benchmarks.chaos.promises import check_promises
from tests.benchmarks.chaos.traffic import Researcher, Seen, find_questions
from tests.harvest.harvests import download, submit, wait_for

# From the last kill: time for every lease to run out three times, and an engine to load.
SETTLE_SECONDS = 300.0
PAUSE_SECONDS = (1.0, 6.0)


def run_chaos(*, minutes: float, seed: int, harvest_prompts: int = 1500, kills_at_least: int = 0) -> dict[str, Any]:
    """Run for `minutes` and return what was killed, what was answered, how work ended, and the broken promises.

    On a slow machine it goes on until `kills_at_least` parts were killed and a Completion was answered, for
    SETTLE_SECONDS at most.
    """
    with tempfile.TemporaryDirectory(prefix="acs-chaos-") as folder:
        parts = Parts(Path(folder) / "home", seed=seed)
        try:
            parts.start()
            return asyncio.run(
                _run(parts, minutes=minutes, seed=seed, harvest_prompts=harvest_prompts, kills_at_least=kills_at_least)
            )
        finally:
            parts.close()


async def _run(parts: Parts, *, minutes: float, seed: int, harvest_prompts: int, kills_at_least: int) -> dict[str, Any]:
    stack, chance, seen = parts.stack, random.Random(seed), Seen()
    questions = await asyncio.to_thread(find_questions, stack, count=10, seed=seed)
    texts = [question.body["prompt"] for question in questions]
    prompts = [f"{number} {' '.join(chance.choices(texts, k=4))}" for number in range(harvest_prompts)]
    corpus = {"prompts": prompts, "layers": [0, 2, 3], "shard_size": 32}
    first = await asyncio.to_thread(submit, stack, stack.user, **corpus)
    reference = await asyncio.to_thread(lambda: download(wait_for(stack, first["job_id"])))

    users = [stack.new_user(jobs_unfinished=1000) for _ in range(4)]
    people = [
        Researcher(user, urls=parts.urls, questions=questions, seen=seen, chance=random.Random(chance.random()))
        for user in users
    ]
    plain, keyed, with_jobs, harvester = people
    until = asyncio.Event()
    traffic = [
        *(asyncio.create_task(plain.complete(until)) for _ in range(3)),
        *(asyncio.create_task(keyed.complete_once_each(until)) for _ in range(2)),
        *(asyncio.create_task(with_jobs.submit_jobs(until)) for _ in range(2)),
        asyncio.create_task(harvester.harvest(until, {"model": "tiny", **corpus})),
    ]
    ends_at = time.monotonic() + minutes * 60

    def is_over() -> bool:
        has_enough = parts.kills.total() >= kills_at_least and seen.answers["completion: 200"] > 0
        return time.monotonic() >= ends_at + (0 if has_enough else SETTLE_SECONDS)

    while not is_over():
        await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
        await asyncio.to_thread(parts.revive)
        await parts.kill_one()
    until.set()
    await parts.wait_until_calm(seconds=SETTLE_SECONDS)
    crashed = [task.exception() for task in (await asyncio.wait(traffic, timeout=SETTLE_SECONDS))[0]]
    seen.faults += [f"the traffic itself failed: {error!r}" for error in crashed if error is not None]
    figures = await check_promises(
        seen,
        stack=stack,
        researcher=with_jobs,
        harvester=harvester.user,
        reference=reference,
        seconds=SETTLE_SECONDS,
    )
    for person in people:
        await person.close()
    return {
        "minutes": minutes,
        "seed": seed,
        "kills": dict(parts.kills),
        "ended_by_themselves": dict(parts.ended_by_themselves),
        "answers": dict(sorted(seen.answers.items())),
        **figures,
        "broken_promises": seen.faults,
    }
