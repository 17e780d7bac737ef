"""`manage.py quickstart`: from one command to the first harvest."""

import json
import logging
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from acsinfra.quickstart.demonstration import PROMPT, DemonstrationFailed, DemonstrationRefused
from acsinfra.quickstart.home import StartRefused
from acsinfra.quickstart.start import Demonstrated, Quickstart, Report, Stopped, signals_stop
from acsinfra.quickstart.supervisor import ChildFailed, HomeInUse

MAX_PORT = 65_535


def _port(text: str) -> int:
    """Return the port. The C library would take 99999 for 34463, in silence."""
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_PORT):
        raise ArgumentTypeError(f"a port is 0 (any free one) to {MAX_PORT}, not {text!r}")
    return int(text)


class Command(BaseCommand):
    """Starts everything on this machine, uses it once before your eyes, and serves until Ctrl-C."""

    help = (
        "Start PostgreSQL, Valkey, the API, an inference worker, a runner and the scheduler on this machine, use each "
        "once, and serve until Ctrl-C. DATABASE_URL, BROKER_URL, STORAGE_URL and MODELS_FILE replace the parts."
    )
    # There is no database yet, and these settings are not the children's.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help="end after the demonstration")
        parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        parser.add_argument("--host", default="127.0.0.1", help="the address to serve on (default %(default)s)")
        parser.add_argument("--port", type=_port, default=8000, help="the port to serve on (default %(default)s)")
        parser.add_argument("--home", type=Path, default=settings.HOME, help="the folder for all data (%(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        with signals_stop():
            try:
                self._run(once=options["once"], as_json=options["json"], **{k: options[k] for k in HOME_OPTIONS})
            except (StartRefused, HomeInUse, ChildFailed, DemonstrationFailed) as error:
                raise CommandError(str(error)) from error
            except DemonstrationRefused as refused:
                raise CommandError(f"The demonstration was refused: {refused}") from refused
            except OSError as error:  # a home that can't be written, a full disk
                raise CommandError(f"{error.filename or options['home']}: {error.strerror or error}.") from error
            except Stopped as stopped:
                # Before it served, a signal means that what was asked for was not done.
                sys.exit(128 + stopped.number)

    def _run(self, *, once: bool, as_json: bool, home: Path, host: str, port: int) -> None:
        quickstart = Quickstart(home=home, host=host, port=port, must_demonstrate=once or as_json)
        try:
            report = quickstart.run()
            self.stdout.write(report.as_json() if as_json else self._describe(report, quickstart, goes_on=not once))
            self.stdout.flush()
            if not once:
                self._serve(quickstart)
        finally:
            quickstart.close()

    def _serve(self, quickstart: Quickstart) -> None:
        self.stderr.write("Serving until Ctrl-C.")
        try:
            quickstart.serve()
        except Stopped:
            self.stderr.write("Stopping every process …")

    def _describe(self, report: Report, quickstart: Quickstart, *, goes_on: bool) -> str:
        lines = [
            "",
            *(_describe_demonstrated(report.demonstrated) if report.demonstrated else ()),
            f"Data      {quickstart.home}  (logs in {quickstart.supervisor.logs})",
        ]
        if goes_on:
            body = json.dumps({"model": report.models[0], "prompt": PROMPT, "max_tokens": 16})
            lines += [
                f"API       {report.base_url}",
                f"API key   {report.api_key}",
                f"App       {report.app_url}",
                f"Sign in   {report.username} / {report.password}",
                f"Models    {', '.join(report.models)}",
                "",
                f'curl {report.base_url}/completions -H "Authorization: Bearer {report.api_key}" \\',
                f"  -H \"Content-Type: application/json\" -d '{body}'",
            ]
        return "\n".join(lines)


def _describe_demonstrated(done: Demonstrated) -> list[str]:
    shard = done.shards[0]
    tensors = list(shard.tensors.items())
    return [
        f"{PROMPT!r} → {done.completion['choices'][0]['text']!r}",
        f"Job {done.job['id']}: {done.job['status']}.",
        f"Harvest job {done.harvest['job_id']}: {done.harvest['n_prompts']} prompts, "
        f"{done.harvest['tokens']} tokens, layers {done.harvest['layers']}.",
        f"{shard.file}:",
        *(f"  {name:<10} {tensor['dtype']:<9} {tensor['shape']}" for name, tensor in tensors[:6]),
        f"  and {len(tensors) - 6} more tensors.",
        "",
    ]


HOME_OPTIONS = ("home", "host", "port")
