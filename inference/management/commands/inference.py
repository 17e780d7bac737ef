"""`manage.py inference MODEL`: one inference worker."""

import sys
from pathlib import Path

from inference.management.engine_command import EngineCommand
from inference.models import BaseModel


class Command(EngineCommand):
    """Run an engine of a Base model and answer its Completions, until SIGTERM or Ctrl-C."""

    help = "Run an inference worker: one engine of MODEL, which answers POST /v1/completions."

    def run_engine(self, model: BaseModel, checkpoint: Path, *, shares_machine: bool) -> None:
        """Answer Completions and exit."""
        from inference.worker.process import run

        sys.exit(run(model=model, checkpoint=str(checkpoint), shares_machine=shares_machine))
