"""`manage.py bench api|harvest|holds`: what this machine does a second. `tests/benchmarks` has how it is measured."""

import argparse
import dataclasses
import json
import logging
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from acsinfra.quickstart.home import SMALL_MODEL, StartRefused, check_engine_library
from acsinfra.quickstart.start import Stopped, signals_stop
from acsinfra.quickstart.supervisor import ChildFailed

API_FIGURES = ("one_token", "plain_way", "levels", "completions", "waiting", "jobs", "holds")


class Command(BaseCommand):
    """Benchmarks are commands, not tests: they print figures and assert nothing of them."""

    help = "Measure: the API beside the bare engine, `harvest` beside plain prefill, Holds a second."
    # `bench api` and `bench harvest` bring their own database.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_subparsers(dest="what", required=True)
        api = what.add_parser(
            "api", help="Completions and Jobs through an API of its own, beside the same engine driven directly"
        )
        api.add_argument("--quick", action="store_true", help="fewer repetitions, fewer rows")
        api.add_argument("--only", nargs="+", choices=API_FIGURES, default=(), help="measure these alone")
        api.add_argument("--clients", type=int, nargs="+", help="the levels (default: 1 16 64 256)")
        api.add_argument("--source", help="the checkpoint, as addmodel takes it (default: a tiny random model)")
        api.add_argument("--dtype", default="auto", help="of --source (default %(default)s)")
        api.add_argument("--max-num-seqs", type=int, default=64, help="of both engines (default %(default)s)")
        harvest = what.add_parser(
            "harvest", help="tokens/s of plain prefill, of the capture, of jobs into files, of peers"
        )
        harvest.add_argument("--source", help="as addmodel takes it (default: SmolLM2-135M)")
        harvest.add_argument("--dtype", default="auto", help="such as bfloat16 or float32 (default: the checkpoint's)")
        harvest.add_argument("--prompts", type=int, default=200, help="ragged, 63 tokens each (default %(default)s)")
        harvest.add_argument("--rounds", type=int, default=5, help="of every way in turn (default %(default)s)")
        harvest.add_argument(
            "--layers", type=_layers, help="such as 8,16,24; left out: the quartiles. All are measured besides"
        )
        harvest.add_argument("--quick", action="store_true", help="24 prompts, 3 rounds, nothing compiled")
        harvest.add_argument(
            "--memory",
            action="store_true",
            help="measure instead a runner's peak memory at 100 and 4,096 prompts, all layers (default: a tiny model)",
        )
        harvest.add_argument(
            "--peers", action="store_true", help="build an environment for vllm-lens and measure it too: gigabytes"
        )
        holds = what.add_parser("holds", help="Holds taken and settled a second, in the configured database")
        holds.add_argument("--seconds", type=float, default=3.0, help="how long each round takes")
        holds.add_argument("--at-once", type=int, nargs="+", default=[1, 64])
        holds.add_argument("--budgets", type=int, nargs="+", default=[1, 100], help="spread over so many Budgets")
        for each in (api, harvest, holds):
            each.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        figures, text = {"api": _api, "harvest": _harvest, "holds": _holds}[options["what"]](options)
        self.stdout.write(json.dumps(figures) if options["json"] else text)
        if figures.get("imbalances"):
            raise CommandError("Budgets do not add up after the Holds.")


def _api(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from tests.benchmarks import api, report
    from tests.benchmarks.parts import BenchFailed

    logging.getLogger("httpx").setLevel(logging.WARNING)
    plan = api.QUICK if options["quick"] else api.FULL
    if options["clients"]:
        plan = dataclasses.replace(plan, levels=tuple(options["clients"]))
    with signals_stop():
        try:
            check_engine_library()
            figures = api.measure(
                plan=plan,
                source=options["source"],
                dtype=options["dtype"],
                max_num_seqs=options["max_num_seqs"],
                only=options["only"],
            )
        except (BenchFailed, ChildFailed, StartRefused, AssertionError) as error:
            raise CommandError(str(error)) from error
        except Stopped as stopped:
            sys.exit(128 + stopped.number)
    return figures, report.table(figures)


def _harvest(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from tests.benchmarks import harvest, harvest_report
    from tests.benchmarks.parts import BenchFailed

    plan = harvest.Plan(
        source=options["source"] or SMALL_MODEL["source"],
        dtype=options["dtype"],
        n_prompts=min(options["prompts"], 24) if options["quick"] else options["prompts"],
        rounds=min(options["rounds"], 3) if options["quick"] else options["rounds"],
        layers=options["layers"],
        is_quick=options["quick"],
        has_peers=options["peers"],
    )
    with signals_stop():
        try:
            check_engine_library()
            if options["memory"]:
                peaks = harvest.measure_memory(source=options["source"], dtype=options["dtype"], say=_say)
                return peaks, harvest_report.memory_table(peaks)
            figures = harvest.measure(plan, say=_say)
        except (BenchFailed, ChildFailed, StartRefused) as error:
            raise CommandError(str(error)) from error
        except Stopped as stopped:
            sys.exit(128 + stopped.number)
    return figures, harvest_report.table(figures)


def _layers(text: str) -> tuple[int, ...]:
    """Layers with commas between them, ascending; argparse says what is wrong of any other text."""
    return tuple(sorted({int(layer) for layer in text.split(",")}))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _holds(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from tests.benchmarks import holds

    figures = holds.measure(seconds=options["seconds"], at_once=options["at_once"], budgets=options["budgets"])
    return figures, "\n".join(
        f"{found['via']:>7}, {found['at_once']:>3} at once, {found['budgets']:>3} Budgets: "
        f"{found['holds_per_s']:>7.0f} Holds/s, p50 {found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms"
        for found in figures["rounds"]
    )
