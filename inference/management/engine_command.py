"""What the commands that run an engine share: `manage.py inference MODEL` and `manage.py runner MODEL`."""

import argparse
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from acsinfra.core.checks import require_settings
from inference.checkpoints import CheckpointError
from inference.models import BaseModel


class EngineCommand(BaseCommand):
    """A command that runs an engine of one Base model until SIGTERM or Ctrl-C; `run_engine` is the subclass's part."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take the model's name, and whether the machine is the engine's alone."""
        parser.add_argument("model", help="the name of a Base model (see `manage.py addmodel`)")
        parser.add_argument(
            "--whole-machine",
            action="store_true",
            help="on CPU: this engine has the machine to itself, so its threads are bound to cores and never sleep",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Find the model and its files, and run its engine. Raises CommandError for a model that is not there."""
        require_settings(serves_http=False)
        try:
            model = BaseModel.objects.select_related("files").get(name=options["model"])
        except BaseModel.DoesNotExist:
            raise CommandError(f"There is no Base model {options['model']!r}; add it with addmodel.") from None
        self.run_engine(model, self._find_checkpoint(model), shares_machine=not options["whole_machine"])

    def run_engine(self, model: BaseModel, checkpoint: Path, *, shares_machine: bool) -> None:
        """Run the engine of `model`, whose files are at `checkpoint`, and end this process."""
        raise TypeError(f"{type(self).__name__} runs no engine")

    def _find_checkpoint(self, model: BaseModel) -> Path:
        from inference.engine.checkpoint import resolve_source

        try:
            return resolve_source(
                model.source,
                cache_dir=settings.MODELS_CACHE,
                revision=model.revision or None,
                on_progress=lambda text: self.stderr.write(text),
            )
        except CheckpointError as error:
            raise CommandError(f"The checkpoint of {model.name} can't be had: {error}") from error
