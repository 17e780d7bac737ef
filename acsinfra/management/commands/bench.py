"""`manage.py bench completions|harvest`: measure this machine against the configured database and broker."""

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Benchmarks are commands, not tests: they print figures and assert nothing."""

    help = "Measure: `harvest` beside plain prefill on the same engine."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_subparsers(dest="what", required=True)
        harvest = what.add_parser("harvest", help="tokens/s of plain prefill, of the capture, and of jobs into files")
        harvest.add_argument("model", help="the name of a Base model")
        harvest.add_argument("--prompts", type=int, default=200)
        harvest.add_argument("--rounds", type=int, default=5)
        harvest.add_argument("--layers", help='such as 8,16,24, or "all"; left out: the quartiles')
        harvest.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        from inference.models import BaseModel
        from tests.benchmarks import harvest

        layers = options["layers"]
        if layers == "all":
            layers = range(BaseModel.objects.get(name=options["model"]).n_layers)
        elif layers is not None:
            layers = [int(layer) for layer in layers.split(",")]
        figures = harvest.measure(
            model_name=options["model"], n_prompts=options["prompts"], rounds=options["rounds"], layers=layers
        )
        if options["json"]:
            self.stdout.write(json.dumps(figures))
            return
        self.stdout.write(f"{figures['prompts']} prompts, {figures['tokens']} tokens, layers {figures['layers']}")
        for name, value in figures["tokens_per_s"].items():
            ratio = figures["ratios"].get(f"{name}_over_prefill", 1.0)
            self.stdout.write(f"{name:12} {value:8} tokens/s  {ratio:.3f} of prefill")
