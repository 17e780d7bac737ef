"""`manage.py chaos`: kill -9 every part under real traffic, and see that every promise is kept."""

import argparse
import json
import logging
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from acsinfra.quickstart.home import StartRefused, check_engine_library
from acsinfra.quickstart.start import Stopped, signals_stop
from acsinfra.quickstart.supervisor import ChildFailed


class Command(BaseCommand):
    """Kills only what it started itself: a PostgreSQL, a Valkey, two API processes, workers, all of its own."""

    help = "Kill -9 parts at random under traffic for some minutes; exit 1 where a promise is broken."

    # It brings its own database.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--minutes", type=float, default=10.0, help="how long to kill; starting and checking add to it"
        )
        parser.add_argument("--seed", type=int, help="of what is killed and asked; left out: a new one")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        from tests.benchmarks.chaos.run import run_chaos

        seed = secrets.randbelow(10**6) if options["seed"] is None else options["seed"]
        logging.getLogger("httpx").setLevel(logging.WARNING)
        try:
            check_engine_library()
            with signals_stop():
                figures = run_chaos(minutes=options["minutes"], seed=seed)
        except (StartRefused, ChildFailed) as error:
            raise CommandError(str(error)) from error
        except Stopped as stopped:
            sys.exit(128 + stopped.number)
        if options["json"]:
            self.stdout.write(json.dumps(figures))
        else:
            self._print(figures)
        if figures["broken_promises"]:
            raise CommandError(f"{len(figures['broken_promises'])} promises were broken (--seed {seed}).")

    def _print(self, figures: Mapping[str, Any]) -> None:
        for title in ("kills", "ended_by_themselves", "answers", "jobs", "harvests"):
            self.stdout.write(title.replace("_", " "))
            for name, count in figures[title].items():
                self.stdout.write(f"  {name:44} {count:6}")
        for name in ("holds_live", "ledger_rows", "tokens_charged"):
            self.stdout.write(f"{name.replace('_', ' '):46} {figures[name]:6}")
        for sentence in figures["broken_promises"]:
            self.stdout.write(f"BROKEN: {sentence}")
