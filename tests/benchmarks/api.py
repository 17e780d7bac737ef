"""`manage.py bench api`: what the API adds to the engine, and what Completions, Jobs and Holds it does a second.

It starts all it measures by itself (see `tests.benchmarks.parts`): PostgreSQL and Valkey as durable as the
quickstart's, one API process, one inference worker, the scheduler, and beside them the same engine in a process of its
own, without anything around it. API and engine take turns, block by block, so that both see the same machine and never
load it together. `--json` prints one object:

- `machine`: `cpus`, and `load_before`, the load average at the start (0 on a quiet machine).
- `model`: `source`, `max_num_seqs`, `quick` (whether fewer repetitions were made).
- `one_token`: Completions of one token from one client. `requests`; `api` and `engine`, each `p50_ms` and `p99_ms`;
  `added_p50_ms`, `added_p99_ms`: their differences; `added_over_engine`: the first over the engine's p50, which tells
  a slow way from a slow machine.
- `plain_way`: the same with `tests.benchmarks.plain_way` between them, a build of the way with nothing around it: has a
  `plain_way` beside `api` and `engine`, `plain_way_added_p50_ms` and `plain_way_added_p99_ms`.
- `levels`: for 1, 16, 64 and 256 clients, answers of `answer_tokens` tokens on average. `clients`, `requests` (both
  ways, each); `api` and `engine`, each `per_s`, `p50_ms`, `p99_ms`; `added_p50_ms`, `added_p99_ms`;
  `throughput_ratio`: the median over the rounds of the API's answers a second over the engine's; `cpu_ms` as below,
  and `engine_cpu_share`, the engine's part of it: steadier than the ratio, which it bounds where the engine would
  have every core.
- `completions`: as many Completions of one token as come through, from 64 clients: `per_s`, `engine_per_s`, and
  `cpu_ms`, what one cost each part in milliseconds of the CPU (`client` is the benchmark's own cost).
- `waiting`: `asked` at once of one API process, `at_once` the most that it had, `answered` in the end, its
  `rss_before_mib` and `rss_peak_mib`, and `threads_peak`.
- `jobs`: `submits_per_s` with its `submit_p50_ms` and `submit_p99_ms` from 16 clients on an empty table, `cpu_ms` of
  one submit by part; the same as `full_…` when the table has `rows` rows, `waiting` of them waiting; `claim_p50_ms`,
  `claim_p99_ms` of taking the next row then, and `take_…` of all that a worker does to begin a Job: row, Hold, work.
- `holds`: as `manage.py bench holds --json`.
- `seconds`: what each step took.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from acsinfra.quickstart.steps import Steps
from tests.benchmarks.direct_engine import DirectLoad
from tests.benchmarks.figures import Outcome, median_ratio, quantiles, steady
from tests.benchmarks.http_load import Load
from tests.benchmarks.parts import BenchFailed, Parts

PROMPT = "The capital of France is"
COMPLETIONS = "/v1/completions"
JOBS = "/v1/completion-jobs"
WARM_UP = 64
# Of these parts of the average: answers of one length would all end at once, wave after wave.
LENGTHS = (0.75, 1.25, 0.875, 1.125, 1.0)
PUMP_CLIENTS = 64
SUBMIT_CLIENTS = 16
SUBMITTERS = 50
# The first so many of the waiting requests keep the engine busy until all are there.
LONG_ANSWERS = 64
LONG_TOKENS = 480
# A model that Jobs are submitted to and no engine serves: what a Job costs must not be in what its submit costs.
PARKED = "parked"

MAKE_PARKED = """
from datetime import timedelta
from django.utils import timezone
from inference.models import BaseModel, Engine
now = timezone.now()
Engine.objects.create(
    base_model=BaseModel.objects.get(name=name), kind="inference", status="live", host="nowhere", pid=1, live_at=now,
    heartbeat_at=now + timedelta(days=1))
result = None
"""
FILL = """
from tests.benchmarks.job_rows import fill
result = fill(model_name=name, ended=ended, waiting=waiting)
"""
CLAIM = """
from tests.benchmarks.job_rows import time_claims
result = time_claims(model_name=name, claims=claims)
"""


@dataclass(frozen=True)
class Plan:
    """How much is measured; the counts are of each side, and of each round where there are rounds."""

    one_token_requests: int = 500
    one_token_block: int = 50
    levels: tuple[int, ...] = (1, 16, 64, 256)
    rounds: int = 5
    answer_tokens: int = 32
    pumped: int = 2_000
    waiting: int = 2_000
    submits: int = 2_000
    ended_jobs: int = 900_000
    waiting_jobs: int = 100_000
    claims: int = 200
    hold_seconds: float = 3.0
    is_quick: bool = False

    def answers(self, clients: int) -> int:
        """How many answers a round has at so many clients."""
        each = {1: 40, 16: 12, 64: 6}.get(clients, 4)
        return clients * each


FULL = Plan()
QUICK = Plan(
    one_token_requests=200,
    rounds=2,
    answer_tokens=16,
    pumped=800,
    submits=500,
    ended_jobs=100_000,
    claims=50,
    hold_seconds=1.0,
    is_quick=True,
)


def measure(
    *, plan: Plan, source: str | None, dtype: str, max_num_seqs: int, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Start everything, measure, end everything; returns the object above, or `only` these keys of it.

    Raises BenchFailed and ChildFailed.
    """
    steps = Steps()
    load_before = round(os.getloadavg()[0], 2)
    try:
        with steps.step("start", "PostgreSQL, Valkey, API, inference worker, scheduler and a second engine started"):
            parts = Parts(source=source, dtype=dtype, max_num_seqs=max_num_seqs)
        try:
            bench = ApiBench(parts, plan)
            figures = {name: bench.run(steps, name) for name in MEASURES if name in (only or MEASURES)}
        finally:
            parts.close()
    finally:
        steps.end()
    return {
        "machine": {"cpus": os.cpu_count(), "load_before": load_before},
        "model": {"source": source or "tiny", "max_num_seqs": max_num_seqs, "quick": plan.is_quick},
        **figures,
        "seconds": steps.seconds,
    }


class ApiBench:
    """The measurements, on `parts`."""

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts = parts
        self._stack = parts.stack
        self._plan = plan
        self._prompt = self._tokenise()

    def run(self, steps: Steps, name: str) -> Any:
        """Return the figures `name`, as a step."""
        text, measure = MEASURES[name]
        with steps.step(name, text):
            figures = measure(self)
        # Whatever fails later, this was measured.
        steps.say(f"  {json.dumps(figures)}")
        return figures

    # One token, one client

    def one_token(self) -> dict[str, Any]:
        self._warm_up()
        plan = self._plan
        seconds: dict[str, list[float]] = {"api": [], "engine": []}
        for number in range(plan.one_token_requests // plan.one_token_block):
            outcomes = self._take_turns(number, clients=1, requests=plan.one_token_block, lengths=[1])
            for side, outcome in outcomes.items():
                seconds[side] += outcome.latencies
        figures = {"requests": len(seconds["api"]), **_added(seconds["api"], seconds["engine"])}
        return figures | {"added_over_engine": round(figures["added_p50_ms"] / figures["engine"]["p50_ms"], 2)}

    def plain_way(self) -> dict[str, Any]:
        port = self._parts.start_plain_way()
        self._warm_up()
        body = json.dumps({"prompt": self._prompt, "max_tokens": 1})

        def load(requests: int) -> Outcome:
            asked = self._load(COMPLETIONS, [body], clients=1, requests=requests)
            return self._parts.load_api(msgspec.structs.replace(asked, port=port))

        load(WARM_UP)
        plan = self._plan
        seconds: dict[str, list[float]] = {"api": [], "plain_way": [], "engine": []}
        for number in range(plan.one_token_requests // plan.one_token_block):
            outcomes = self._take_turns(number, clients=1, requests=plan.one_token_block, lengths=[1])
            for side, outcome in {**outcomes, "plain_way": load(plan.one_token_block)}.items():
                seconds[side] += outcome.latencies
        plain = _added(seconds["plain_way"], seconds["engine"])
        return {
            "requests": len(seconds["api"]),
            **_added(seconds["api"], seconds["engine"]),
            "plain_way": plain["api"],
            "plain_way_added_p50_ms": plain["added_p50_ms"],
            "plain_way_added_p99_ms": plain["added_p99_ms"],
        }

    # Many clients, longer answers

    def levels(self) -> list[dict[str, Any]]:
        return [self._level(clients) for clients in self._plan.levels]

    def _level(self, clients: int) -> dict[str, Any]:
        plan = self._plan
        lengths = [max(1, round(plan.answer_tokens * share)) for share in LENGTHS]
        rates: dict[str, list[float]] = {"api": [], "engine": []}
        seconds: dict[str, list[float]] = {"api": [], "engine": []}
        cpu: dict[str, float] = {}
        requests = plan.answers(clients)
        for number in range(plan.rounds):
            asked = self._take_turns(number, clients=clients, requests=requests, lengths=lengths, cpu=cpu)
            for side, outcome in asked.items():
                rate, latencies = steady(outcome, clients)
                rates[side].append(rate)
                seconds[side] += latencies
        figures = _added(seconds["api"], seconds["engine"])
        for side, of_rounds in rates.items():
            figures[side] = {"per_s": round(sum(of_rounds) / len(of_rounds), 1), **figures[side]}
        return {
            "clients": clients,
            "answer_tokens": plan.answer_tokens,
            "requests": requests * plan.rounds,
            **figures,
            "throughput_ratio": round(median_ratio(rates["api"], rates["engine"]), 3),
            "cpu_ms": _per_request(cpu, requests * plan.rounds),
            "engine_cpu_share": round(cpu["engine"] / sum(cpu.values()), 3),
        }

    # As many as come through

    def completions(self) -> dict[str, Any]:
        rates: dict[str, list[float]] = {"api": [], "engine": []}
        cpu: dict[str, float] = {}
        for number in range(2):
            asked = self._take_turns(number, clients=PUMP_CLIENTS, requests=self._plan.pumped, lengths=[1], cpu=cpu)
            for side, outcome in asked.items():
                rates[side].append(steady(outcome, PUMP_CLIENTS)[0])
        return {
            "clients": PUMP_CLIENTS,
            "per_s": round(max(rates["api"]), 1),
            "engine_per_s": round(max(rates["engine"]), 1),
            "cpu_ms": _per_request(cpu, 2 * self._plan.pumped),
        }

    # Two thousand at once

    def waiting(self) -> dict[str, Any]:
        plan = self._plan
        user = self._stack.new_user(requests_at_once=LONG_ANSWERS, requests_queued=2 * plan.waiting)
        long, short = self._body(LONG_TOKENS), self._body(1)
        bodies = [long] * LONG_ANSWERS + [short] * (plan.waiting - LONG_ANSWERS)
        load = self._load(COMPLETIONS, bodies, clients=plan.waiting, requests=plan.waiting, keys=[user.key])
        with self._parts.watch_waiting(user) as watch:
            outcome = self._parts.load_api(load)
        mib = 1024 * 1024
        return {
            "asked": plan.waiting,
            "at_once": watch.waiting_peak,
            "answered": len(outcome.latencies),
            "rss_before_mib": round(watch.rss_before / mib, 1),
            "rss_peak_mib": round(watch.rss_peak / mib, 1),
            "threads_peak": watch.threads_peak,
        }

    # Jobs

    def jobs(self) -> dict[str, Any]:
        plan, stack = self._plan, self._stack
        stack.manage("addmodel", PARKED, *self._parts.model_options)
        stack.django(MAKE_PARKED, name=PARKED)
        keys = [stack.new_user(jobs_unfinished=10_000_000).key for _ in range(SUBMITTERS)]
        self._submit(keys, 4 * SUBMIT_CLIENTS)
        cpu: dict[str, float] = {}
        on_empty = self._submit(keys, plan.submits, cpu)
        filled = stack.django(FILL, name=PARKED, ended=plan.ended_jobs, waiting=plan.waiting_jobs)
        on_full = self._submit(keys, plan.submits)
        claims = stack.django(CLAIM, name=PARKED, claims=plan.claims)
        return {
            **_submits("", on_empty),
            "cpu_ms": _per_request(cpu, plan.submits),
            "rows": filled["rows"],
            "waiting": claims["waiting"],
            "fill_seconds": filled["seconds"],
            **_submits("full_", on_full),
            **{f"{step}_{name}": claims[step][name] for step in ("claim", "take") for name in ("p50_ms", "p99_ms")},
        }

    def _submit(self, keys: Sequence[str], requests: int, cpu: dict[str, float] | None = None) -> Outcome:
        body = self._body(16, model=PARKED)
        load = self._load(JOBS, [body], clients=SUBMIT_CLIENTS, requests=requests, keys=keys, status=202)
        return self._load_and_count(load, {} if cpu is None else cpu)

    def holds(self) -> dict[str, Any]:
        options = ["--json", "--seconds", str(self._plan.hold_seconds)]
        figures: dict[str, Any] = json.loads(self._stack.manage("bench", "holds", *options))
        if figures["imbalances"]:
            raise BenchFailed("Budgets do not add up after the Holds.")
        return figures

    # Their parts

    def _take_turns(
        self, number: int, *, clients: int, requests: int, lengths: list[int], cpu: dict[str, float] | None = None
    ) -> dict[str, Outcome]:
        """Load the one, then the other; which one is first changes with the round's number.

        What the API's turn took of the CPU is added to `cpu`, in seconds of each part.
        """
        load = self._load(COMPLETIONS, [self._body(tokens) for tokens in lengths], clients=clients, requests=requests)
        sides: dict[str, Callable[[], Outcome]] = {
            "api": lambda: self._load_and_count(load, {} if cpu is None else cpu),
            "engine": lambda: self._parts.load_engine(
                DirectLoad(prompt=self._prompt, max_tokens=lengths, in_flight=clients, requests=requests)
            ),
        }
        order = list(sides) if number % 2 else list(reversed(sides))
        return {side: sides[side]() for side in order}

    def _load_and_count(self, load: Load, cpu: dict[str, float]) -> Outcome:
        before = self._parts.cpu_seconds()
        outcome = self._parts.load_api(load)
        used = {name: seconds - before[name] for name, seconds in self._parts.cpu_seconds().items()}
        for name, seconds in (used | {"client": outcome.cpu_seconds}).items():
            cpu[name] = cpu.get(name, 0.0) + seconds
        return outcome

    def _load(
        self,
        path: str,
        bodies: list[str],
        *,
        clients: int,
        requests: int,
        keys: Sequence[str] = (),
        status: int = 200,
    ) -> Load:
        return Load(
            port=self._stack.port,
            path=path,
            keys=list(keys) or [self._stack.user.key],
            bodies=bodies,
            clients=clients,
            requests=requests,
            idempotent=path == JOBS,
            status=status,
        )

    def _body(self, max_tokens: int, model: str = "tiny") -> str:
        return json.dumps(
            {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        )

    def _tokenise(self) -> list[int]:
        body = {**json.loads(self._body(1)), "return_token_ids": True}
        with self._stack.client() as client:
            answer = client.post("completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise BenchFailed(f"The first Completion failed: {answer.text}")
        found: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return found

    def _warm_up(self) -> None:
        for clients in (1, WARM_UP):
            self._take_turns(0, clients=clients, requests=2 * WARM_UP, lengths=[4])


MEASURES: dict[str, tuple[str, Callable[[ApiBench], Any]]] = {
    "one_token": ("Completions of one token, one client", ApiBench.one_token),
    "plain_way": ("The same beside a plain way", ApiBench.plain_way),
    "levels": ("Longer answers of several clients at once", ApiBench.levels),
    "completions": ("Completions a second", ApiBench.completions),
    "waiting": ("Requests waiting at once in one API process", ApiBench.waiting),
    "jobs": ("Job submits and claims", ApiBench.jobs),
    "holds": ("Holds a second", ApiBench.holds),
}


def _added(api: Sequence[float], engine: Sequence[float]) -> dict[str, Any]:
    ours, theirs = quantiles(api), quantiles(engine)
    return {
        "api": {"p50_ms": round(ours.p50_ms, 3), "p99_ms": round(ours.p99_ms, 3)},
        "engine": {"p50_ms": round(theirs.p50_ms, 3), "p99_ms": round(theirs.p99_ms, 3)},
        "added_p50_ms": round(ours.p50_ms - theirs.p50_ms, 3),
        "added_p99_ms": round(ours.p99_ms - theirs.p99_ms, 3),
    }


def _submits(prefix: str, outcome: Outcome) -> dict[str, float]:
    rate, latencies = steady(outcome, SUBMIT_CLIENTS)
    taken = quantiles(latencies)
    return {
        f"{prefix}submits_per_s": round(rate, 1),
        f"{prefix}submit_p50_ms": round(taken.p50_ms, 3),
        f"{prefix}submit_p99_ms": round(taken.p99_ms, 3),
    }


def _per_request(cpu: dict[str, float], requests: int) -> dict[str, float]:
    return {name: round(seconds / requests * 1000, 3) for name, seconds in cpu.items()}
