"""`manage.py runner MODEL`: one runner."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from django.conf import settings

from harvest.models import PROMPTS_AT_MOST
from inference.management.engine_command import EngineCommand
from inference.models import BaseModel


class Command(EngineCommand):
    """Run the Harvest jobs of a Base model, one at a time, until SIGTERM or Ctrl-C."""

    help = "Run a runner: one engine of MODEL, which runs its Harvest jobs."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the engine in a process that may die of what it reads, and that another then takes the place of."""
        from harvest.runner.lives import begin_life
        from inference.engine.fork_server import fork_the_fork_server

        self._life = begin_life(n_prompts=PROMPTS_AT_MOST)
        fork_the_fork_server()
        super().handle(*args, **options)

    def run_engine(self, model: BaseModel, checkpoint: Path, *, shares_machine: bool) -> None:
        """Run jobs and exit."""
        from inference.engine.environment import prepare_environment

        prepare_environment(
            checkpoint=str(checkpoint),
            tensor_parallel_size=model.tensor_parallel_size,
            shares_machine=shares_machine,
            compile_cache=settings.ENGINE_CACHE,
        )

        from harvest.runner.worker import run

        code = run(model=model, checkpoint=str(checkpoint), life=self._life)
        # All is ended in order by now. Python's own end would first go through the garbage of torch and vllm, which
        # takes longer than a supervisor waits.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
