"""Whether uploads to S3 slow the forward pass: the same job into a folder and into an S3 server on loopback, in turn.

`python -m tests.benchmarks.harvest_uploads [--source … --dtype … --prompts … --rounds … --all-layers]` prints the
medians; the server is rclone's, which runs on the same cores: its CPU is what the forward pass lacks.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import django
import psutil

from acsinfra.quickstart.home import SMALL_MODEL
from tests.benchmarks.figures import median_ratio
from tests.benchmarks.harvest import Way, quartiles, stack_for_engines
from tests.s3_server import ACCESS_KEY, SECRET_KEY, running_s3_server

TIMINGS: Final = ("forward_s", "save_s", "upload_s", "other_s")
CPU: Final = ("cpu_seconds", "server_cpu_seconds")


def measure(*, source: str, dtype: str, n_prompts: int, rounds: int, is_every_layer: bool) -> dict[str, Any]:
    """Run the job into each storage in turn; return what every run took."""
    with contextlib.ExitStack() as closing:
        home = Path(tempfile.mkdtemp(prefix="acs-bench-"))
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        env = closing.enter_context(stack_for_engines(home))
        env |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        server = closing.enter_context(running_s3_server(home / "s3"))
        command = [sys.executable, "-m", "tests.benchmarks.harvest_engine", source, dtype, str(n_prompts), "eager"]
        way = Way("eager", [*command, str(home / "tokens.json")], env=env, logs=home / "logs")
        closing.callback(way.end)
        facts = way.hear()
        layers = tuple(range(facts["n_layers"])) if is_every_layer else quartiles(facts["n_layers"])
        storages = {"folder": (home / "files").as_uri(), "s3": server.url}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in storages}
        rclone = psutil.Process(server.pid)
        for turn in range(rounds + 1):
            for name, url in storages.items():
                before = _cpu_seconds(rclone)
                answer = way.ask(way="end_to_end", layers=layers, storage=url)
                answer["server_cpu_seconds"] = _cpu_seconds(rclone) - before
                # The first turn warms up.
                if turn:
                    runs[name].append(answer)
    return {"facts": facts, "layers": layers, "runs": runs}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(measured: dict[str, Any]) -> str:
    """The medians of each storage, and S3 beside the folder."""
    facts, runs = measured["facts"], measured["runs"]
    lines = [
        f"{facts['served_model_name']}, {facts['dtype']}, {len(measured['layers'])} layers, {facts['tokens']} tokens",
        f"{'':8} {'tokens/s':>9} " + " ".join(f"{name:>10}" for name in (*TIMINGS, "our CPU s", "its CPU s")),
    ]
    for name, answers in runs.items():
        seconds = statistics.median(answer["seconds"] for answer in answers)
        medians = [statistics.median(answer["timings"][timing] for answer in answers) for timing in TIMINGS]
        medians += [statistics.median(answer[name] for answer in answers) for name in CPU]
        lines.append(f"{name:8} {facts['tokens'] / seconds:9.0f} " + " ".join(f"{value:10.3f}" for value in medians))
    whole = median_ratio(*([answer["seconds"] for answer in runs[name]] for name in ("folder", "s3")))
    forward = median_ratio(*([answer["timings"]["forward_s"] for answer in runs[name]] for name in ("folder", "s3")))
    lines.append(f"into S3 at {whole:.3f} of the folder's speed; the forward pass alone at {forward:.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default=SMALL_MODEL["source"], help="as addmodel takes it (default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all-layers", action="store_true")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    django.setup()
    measured = measure(
        source=asked.source,
        dtype=asked.dtype,
        n_prompts=asked.prompts,
        rounds=asked.rounds,
        is_every_layer=asked.all_layers,
    )
    sys.stdout.write(f"{table(measured)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
