"""Holds a second, taken and settled, against the configured database: by threads (Jobs) and by the async pool."""

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db import connection

from accounts.models import ApiKey, User
from accounts.services import create_key, create_user
from acsinfra.core.db import close_async_pool
from budgets.models import WorkKind
from budgets.selectors import imbalances
from budgets.services import (
    WorkRef,
    settle_hold,
    settle_hold_async,
    take_hold,
    take_hold_async,
)
from tests.benchmarks.figures import quantiles

type Owner = tuple[User, ApiKey]


@dataclass(frozen=True)
class Figures:
    """One round: Holds taken and settled a second, and how long one such pair took, in milliseconds."""

    via: str
    at_once: int
    budgets: int
    holds_per_s: float
    p50_ms: float
    p99_ms: float


def measure(*, seconds: float, at_once: Sequence[int], budgets: Sequence[int]) -> dict[str, Any]:
    """Run a round of `seconds` for each of `at_once` workers over each of `budgets` Budgets, both ways.

    Returns the Figures of each as `rounds`, and `imbalances`: how many Budgets did not add up at the end, which is a
    fault. Makes Users of its own, and deletes them and their Holds.
    """
    rounds: list[Figures] = []
    owners = [_make_owner() for _ in range(max(budgets))]
    try:
        for n_budgets in budgets:
            for workers in at_once:
                for way in (_measure_threads, _measure_async):
                    rounds.append(way(owners[:n_budgets], workers, seconds))
        faults = [fault for user, _ in owners for fault in imbalances(user=user)]
    finally:
        User.objects.filter(pk__in=[user.pk for user, _ in owners]).delete()
    return {"rounds": [asdict(figures) for figures in rounds], "imbalances": len(faults)}


def _make_owner() -> Owner:
    name = f"bench-{secrets.token_hex(8)}"
    user = create_user(username=name, email=f"{name}@bench.invalid")
    key, _ = create_key(user=user, name="bench")
    take_hold(user=user, api_key=key, tokens=0, work=_work())
    return user, key


def _work() -> WorkRef:
    return WorkRef(WorkKind.COMPLETION, f"bench_{secrets.token_hex(16)}")


def _measure_threads(owners: Sequence[Owner], at_once: int, seconds: float) -> Figures:
    times: list[float] = []

    def run(worker: int) -> None:
        own: list[float] = []
        try:
            while (began := time.perf_counter()) < ends:
                user, key = owners[(worker + len(own)) % len(owners)]
                hold = take_hold(user=user, api_key=key, tokens=2, work=_work())
                settle_hold(hold=hold, tokens=1)
                # As a task's end does: the connection goes back to the pool.
                connection.close()
                own.append(time.perf_counter() - began)
        finally:
            connection.close()
            times.extend(own)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(at_once)]
    ends = time.perf_counter() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _figures("threads", owners, at_once, seconds, times)


def _measure_async(owners: Sequence[Owner], at_once: int, seconds: float) -> Figures:
    times: list[float] = []

    async def worker(number: int, ends: float) -> None:
        count = 0
        while (began := time.perf_counter()) < ends:
            user, key = owners[(number + count) % len(owners)]
            hold = await take_hold_async(user=user, api_key=key, tokens=2, work=_work())
            await settle_hold_async(hold=hold, tokens=1)
            times.append(time.perf_counter() - began)
            count += 1

    async def run() -> None:
        try:
            ends = time.perf_counter() + seconds
            await asyncio.gather(*(worker(number, ends) for number in range(at_once)))
        finally:
            await close_async_pool()

    asyncio.run(run())
    return _figures("async", owners, at_once, seconds, times)


def _figures(via: str, owners: Sequence[Owner], at_once: int, seconds: float, times: Sequence[float]) -> Figures:
    taken = quantiles(times)
    return Figures(
        via=via,
        at_once=at_once,
        budgets=len(owners),
        holds_per_s=round(len(times) / seconds, 1),
        p50_ms=round(taken.p50_ms, 3),
        p99_ms=round(taken.p99_ms, 3),
    )
