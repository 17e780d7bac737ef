"""`manage.py inference MODEL`: one inference worker."""

import sys
from pathlib import Path
from typing import Any

from inference.management.engine_command import EngineCommand
from inference.models import BaseModel


class Command(EngineCommand):
    """Run an engine of a Base model and answer its Completions, until SIGTERM or Ctrl-C."""

    help = "Run an inference worker: one engine of MODEL, which answers POST /v1/completions."

    def handle(self, *args: Any, **options: Any) -> None:
        """Fork what the engine's processes are forked from, if this process was itself forked from a launcher."""
        from inference.engine.fork_server import fork_the_fork_server

        fork_the_fork_server()
        super().handle(*args, **options)

    def run_engine(self, model: BaseModel, checkpoint: Path, *, shares_machine: bool) -> None:
        """Answer Completions and exit."""
        from inference.worker.process import run

        sys.exit(run(model=model, checkpoint=str(checkpoint), shares_machine=shares_machine))
