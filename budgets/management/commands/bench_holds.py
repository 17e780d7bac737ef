"""`manage.py bench_holds`: Holds a second, taken and settled, against the configured database."""

import asyncio
import json
import secrets
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
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


class Command(BaseCommand):
    """Makes Users of its own, and deletes them and their Holds at its end."""

    help = "Measure Holds a second, each taken and settled: threads (Jobs) and the async pool (Completions)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--seconds", type=float, default=3.0, help="How long each round takes.")
        parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64])
        parser.add_argument("--budgets", type=int, nargs="+", default=[1, 100], help="Spread over so many Budgets.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        rounds: list[Figures] = []
        owners = [_make_owner() for _ in range(max(options["budgets"]))]
        try:
            for budgets in options["budgets"]:
                for at_once in options["at_once"]:
                    for measure in (_measure_threads, _measure_async):
                        rounds.append(measure(owners[:budgets], at_once, options["seconds"]))
                        if not options["json"]:
                            self._print(rounds[-1])
            faults = [fault for user, _ in owners for fault in imbalances(user=user)]
        finally:
            User.objects.filter(pk__in=[user.pk for user, _ in owners]).delete()
        if options["json"]:
            self.stdout.write(
                json.dumps({"rounds": [asdict(figures) for figures in rounds], "imbalances": len(faults)})
            )
        if faults:
            raise SystemExit(1)

    def _print(self, figures: Figures) -> None:
        self.stdout.write(
            f"{figures.via:>7}, {figures.at_once:>3} at once, {figures.budgets:>3} Budgets: "
            f"{figures.holds_per_s:>7.0f} Holds/s, p50 {figures.p50_ms:.2f} ms, p99 {figures.p99_ms:.2f} ms"
        )


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
    cuts = statistics.quantiles(times, n=100)
    return Figures(
        via=via,
        at_once=at_once,
        budgets=len(owners),
        holds_per_s=round(len(times) / seconds, 1),
        p50_ms=round(cuts[49] * 1000, 3),
        p99_ms=round(cuts[98] * 1000, 3),
    )
