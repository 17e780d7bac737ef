"""`manage.py runner MODEL`: one runner."""

import argparse
import logging
import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from acsinfra.core.checks import require_settings
from inference.checkpoints import CheckpointError
from inference.models import BaseModel


class Command(BaseCommand):
    """Run the Harvest jobs of a Base model, one at a time, until SIGTERM or Ctrl-C."""

    help = "Run a runner: one engine of MODEL, which runs its Harvest jobs."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", help="the name of a Base model (see `manage.py addmodel`)")
        parser.add_argument(
            "--whole-machine",
            action="store_true",
            help="on CPU: this engine has the machine to itself, so its threads are bound to cores and never sleep",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        require_settings(serves_http=False)
        try:
            model = BaseModel.objects.select_related("files").get(name=options["model"])
        except BaseModel.DoesNotExist:
            raise CommandError(f"There is no Base model {options['model']!r}; add it with addmodel.") from None

        from inference.engine.checkpoint import resolve_source

        try:
            checkpoint = resolve_source(
                model.source,
                cache_dir=settings.MODELS_CACHE,
                revision=model.revision or None,
                on_progress=lambda text: self.stderr.write(text),
            )
        except CheckpointError as error:
            raise CommandError(f"The checkpoint of {model.name} can't be had: {error}") from error

        from inference.engine.environment import prepare_environment

        prepare_environment(
            checkpoint=str(checkpoint),
            tensor_parallel_size=model.tensor_parallel_size,
            shares_machine=not options["whole_machine"],
            compile_cache=settings.ENGINE_CACHE,
        )

        from harvest.runner.worker import run

        code = run(model=model, checkpoint=str(checkpoint))
        # All is ended in order by now. Python's own end would first go through the garbage of torch and vllm, which
        # takes longer than a supervisor waits.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
