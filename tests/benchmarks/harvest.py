"""How fast a harvest is beside plain prefill: one model, the same prompts and layers, every way taking its turn.

Each way has a process of its own, which is stopped (SIGSTOP) while another has its turn: an engine's waiting threads
spin, and would slow the others down.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from django.conf import settings

from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey
from acsinfra.quickstart.supervisor import PROJECT, Supervisor
from tests.benchmarks.figures import median_ratio
from tests.benchmarks.harvest_peers import PeersUnavailable, build_peers
from tests.benchmarks.parts import BenchFailed, make_tiny_model_in

BATCH_SIZES: Final = (8, 16, 32)
LOG_TAIL_BYTES: Final = 4_000
FEW_PROMPTS: Final = 100
MOST_PROMPTS: Final = 4_096
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. `layers` None: the quartiles. `is_quick` leaves out what has to compile."""

    source: str
    dtype: str
    n_prompts: int
    rounds: int
    layers: tuple[int, ...] | None = None
    is_quick: bool = False
    has_peers: bool = False


class Way:
    """A process that goes its ways when asked, and sleeps in between."""

    def __init__(self, name: str, command: Sequence[str], *, env: dict[str, str], logs: Path) -> None:
        self._name, self._log = name, logs / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                cwd=PROJECT,
                env={key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def hear(self) -> dict[str, Any]:
        """What it says next; it sleeps then. Raises BenchFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise BenchFailed(f"{self._name} ended by itself:\n{tail}")
        self._signal(signal.SIGSTOP)
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, **question: object) -> dict[str, Any]:
        """Wake it for one turn."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.hear()

    def end(self) -> None:
        """End it and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass
class Turns:
    """Seconds of each measured way, round by round; and why a way was not measured."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ratio(self, ours: str, theirs: str, *, of_cpu: bool = False) -> float | None:
        """How many times as fast `ours` is as `theirs`, or as sparing of the CPU: the median of the rounds."""
        seconds = self.cpu_seconds if of_cpu else self.seconds
        if ours not in seconds or theirs not in seconds:
            return None
        return round(median_ratio(seconds[theirs], seconds[ours]), 3)


def measure(plan: Plan, *, say: Say) -> dict[str, Any]:
    """Start every way with a database of this benchmark's own, take turns, and return medians and ratios."""
    with contextlib.ExitStack() as closing:
        home = Path(tempfile.mkdtemp(prefix="acs-bench-"))
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        env = closing.enter_context(stack_for_engines(home))
        logs = home / "logs"

        def start(name: str, *command: str, python: str = sys.executable) -> tuple[Way, dict[str, Any]]:
            say(f"starting {name}")
            way = Way(name, [python, *command], env=env, logs=logs)
            closing.callback(way.end)
            return way, way.hear()

        tokens_file = str(home / "tokens.json")
        engine = "-m", "tests.benchmarks.harvest_engine", plan.source, plan.dtype, str(plan.n_prompts)
        eager, facts = start("eager", *engine, "eager", tokens_file)
        chosen = plan.layers or quartiles(facts["n_layers"])
        every = tuple(range(facts["n_layers"]))
        turns = Turns()
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "prefill": lambda: eager.ask(way="prefill", layers=[]),
            "capture": lambda: eager.ask(way="capture", layers=chosen),
            "end_to_end": lambda: eager.ask(way="end_to_end", layers=chosen),
            "all_layers_capture": lambda: eager.ask(way="capture", layers=every),
            "all_layers": lambda: eager.ask(way="end_to_end", layers=every),
        }
        checkpoint = facts["checkpoint"], facts["dtype"], tokens_file
        hf, _ = start("huggingface", "-m", "tests.benchmarks.harvest_huggingface", *checkpoint)
        best = _best_batch_size(hf, chosen, n_prompts=min(plan.n_prompts, 32), say=say)
        ways["huggingface"] = lambda: hf.ask(batch_size=best, layers=chosen, prompts=plan.n_prompts)
        if facts["multiplies_in_float32"]:
            plain, _ = start("plain", *engine, "plain", str(home / "plain-tokens.json"))
            ways["vllm_products_prefill"] = lambda: plain.ask(way="prefill", layers=[])
        else:
            turns.missing["vllm_products"] = "the engine multiplies as vLLM does"
        compiled_facts: dict[str, Any] = {}
        if plan.is_quick:
            turns.missing["compiled"] = "--quick leaves it out: compiling takes a minute or more"
        else:
            compiled, compiled_facts = start("compiled", *engine, "compiled", str(home / "compiled-tokens.json"))
            ways["compiled_prefill"] = lambda: compiled.ask(way="prefill", layers=[])
            ways["compiled_end_to_end"] = lambda: compiled.ask(way="end_to_end", layers=chosen)
            ways["compiled_all_layers"] = lambda: compiled.ask(way="end_to_end", layers=every)
        if plan.has_peers:
            try:
                python = build_peers(settings.HOME / "peers", say=say)
                script = str(PROJECT / "tests" / "benchmarks" / "harvest_vllm_lens.py")
                lens, _ = start("vllm-lens", script, *checkpoint, python=python)
                answer = lens.ask(layers=chosen)
                if answer["rows"] < answer["rows_due"]:
                    turns.notes["vllm_lens"] = f"captured {answer['rows']} of {answer['rows_due']} tokens"
                ways["vllm_lens"] = lambda: lens.ask(layers=chosen)
            except (PeersUnavailable, BenchFailed) as error:
                turns.missing["vllm_lens"] = str(error)
        else:
            turns.missing["vllm_lens"] = "--peers builds its environment and measures it"
        _take_turns(ways, turns, rounds=plan.rounds, say=say)
    return _figures(plan, facts, compiled_facts, turns, chosen=chosen, best=best)


def measure_memory(*, source: str | None, dtype: str, say: Say) -> dict[str, Any]:
    """The peak of a runner's resident memory in jobs of 100 and of 4,096 prompts and every layer, one after the other.

    `source` None: the tiny model in float32.
    """
    with contextlib.ExitStack() as closing:
        home = Path(tempfile.mkdtemp(prefix="acs-bench-"))
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        if source is None:
            source, dtype = str(make_tiny_model_in(home)), "float32"
        env = closing.enter_context(stack_for_engines(home))
        say("starting the engine")
        command = [sys.executable, "-m", "tests.benchmarks.harvest_engine", source, dtype, str(MOST_PROMPTS), "eager"]
        way = Way("eager", [*command, str(home / "tokens.json")], env=env, logs=home / "logs")
        closing.callback(way.end)
        facts = way.hear()
        every = list(range(facts["n_layers"]))
        way.ask(way="end_to_end", layers=every, prompts=8)  # warms up
        peaks = {}
        for n_prompts in (FEW_PROMPTS, MOST_PROMPTS):
            answer = way.ask(way="end_to_end", layers=every, prompts=n_prompts)
            peaks[n_prompts] = answer["peak_bytes"]
            say(f"{n_prompts} prompts: {answer['peak_bytes'] / 2**20:.0f} MiB at most, {answer['seconds']:.1f} s")
    return {
        "model": facts["served_model_name"],
        "dtype": facts["dtype"],
        "tokens": facts["tokens"],
        "peak_bytes": {str(n_prompts): peak for n_prompts, peak in peaks.items()},
        "difference_bytes": peaks[MOST_PROMPTS] - peaks[FEW_PROMPTS],
    }


def quartiles(n_layers: int) -> tuple[int, ...]:
    return tuple(sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4}))


@contextlib.contextmanager
def stack_for_engines(home: Path) -> Iterator[dict[str, str]]:
    """The environment of processes with an embedded PostgreSQL, migrated."""
    (home / "logs").mkdir(exist_ok=True)
    supervisor = Supervisor(home)
    try:
        postgres, valkey = EmbeddedPostgres(supervisor), EmbeddedValkey(supervisor)
        postgres.start()
        valkey.start()
        env = {
            **os.environ,
            "ACSINFRA_HOME": str(home),
            # What is compiled stays with the models, for the next start.
            "MODELS_CACHE": str(settings.MODELS_CACHE),
            "ENGINE_CACHE": str(settings.ENGINE_CACHE),
            "DATABASE_URL": postgres.create_database("bench"),
            "BROKER_URL": valkey.url,
            "STORAGE_URL": (home / "files").as_uri(),
            "SECRET_KEY": secrets.token_urlsafe(50),
            "ALLOWED_HOSTS": "127.0.0.1",
            "ALLOW_PLAIN_HTTP": "true",
            "MONTHLY_TOKENS": "1000000000000",
            "HARVESTS_UNFINISHED": "1000000",
        }
        command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        migrated = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
        if migrated.returncode:
            raise BenchFailed(f"The database can't be made:\n{migrated.stderr[-LOG_TAIL_BYTES:]}")
        yield env
    finally:
        supervisor.close()


def _best_batch_size(hf: Way, layers: Sequence[int], *, n_prompts: int, say: Say) -> int:
    """The batch size at which HuggingFace is fastest, looked for once."""
    hf.ask(batch_size=BATCH_SIZES[0], layers=layers, prompts=BATCH_SIZES[0])  # warms up
    seconds = {
        size: hf.ask(batch_size=size, layers=layers, prompts=n_prompts)["seconds"]
        for size in BATCH_SIZES
        if size <= n_prompts
    }
    best = min(seconds, key=lambda size: seconds[size])
    say(f"HuggingFace is fastest at batches of {best}")
    return best


def _take_turns(ways: dict[str, Callable[[], dict[str, Any]]], turns: Turns, *, rounds: int, say: Say) -> None:
    for number in range(rounds + 1):
        for name, way in ways.items():
            answer = way()
            if number:  # the first round warms up
                turns.seconds.setdefault(name, []).append(answer["seconds"])
                turns.cpu_seconds.setdefault(name, []).append(answer["cpu_seconds"])
                turns.last[name] = answer
                say(f"round {number} of {rounds}: {name} {answer['seconds']:.2f} s, CPU {answer['cpu_seconds']:.2f} s")


def _figures(
    plan: Plan,
    facts: dict[str, Any],
    compiled: dict[str, Any],
    turns: Turns,
    *,
    chosen: Sequence[int],
    best: int,
) -> dict[str, Any]:
    tokens = facts["tokens"]
    ratios = {
        "end_to_end_over_prefill": ("end_to_end", "prefill"),
        "capture_over_prefill": ("capture", "prefill"),
        "all_layers_over_prefill": ("all_layers", "prefill"),
        "all_layers_capture_over_prefill": ("all_layers_capture", "prefill"),
        "end_to_end_over_vllm_products_prefill": ("end_to_end", "vllm_products_prefill"),
        "over_huggingface": ("end_to_end", "huggingface"),
        "over_vllm_lens": ("end_to_end", "vllm_lens"),
        "compiled_end_to_end_over_prefill": ("compiled_end_to_end", "prefill"),
        "compiled_end_to_end_over_compiled_prefill": ("compiled_end_to_end", "compiled_prefill"),
        "compiled_all_layers_over_prefill": ("compiled_all_layers", "prefill"),
    }
    return {
        "model": facts["served_model_name"],
        "dtype": facts["dtype"],
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "prompts": plan.n_prompts,
        "tokens": tokens,
        "layers": list(chosen),
        "rounds": plan.rounds,
        "huggingface_batch_size": best,
        "load_s": {"eager": facts["load_s"], "compiled": compiled.get("load_s")},
        "tokens_per_s": {name: round(tokens / statistics.median(of), 1) for name, of in turns.seconds.items()},
        "seconds": {name: [round(second, 3) for second in of] for name, of in turns.seconds.items()},
        "timings": {name: last["timings"] for name, last in turns.last.items() if last.get("timings")},
        "ratios": {name: turns.ratio(*of) for name, of in ratios.items()},
        # Steadier where other work runs beside, and right where waiting threads sleep (OMP_WAIT_POLICY=PASSIVE).
        "cpu_ratios": {name: turns.ratio(*of, of_cpu=True) for name, of in ratios.items()},
        "not_measured": turns.missing,
        "notes": turns.notes,
    }
