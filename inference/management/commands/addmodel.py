"""`manage.py addmodel NAME --source …`: add a Base model, or with --update change one."""

import argparse
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from accounts.audit import note_command
from inference.checkpoints import CheckpointError
from inference.engine_args import parse_engine_arg
from inference.models import BaseModel
from inference.services import add_model, update_model

GIB = 1024**3


class Command(BaseCommand):
    """Reads the checkpoint's config and tokenizer, and offers it under NAME."""

    help = "Add a Base model: a hub id, a folder, or the GGUF of a package."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="What requests call it, such as llama-8b.")
        parser.add_argument("--source", help="A hub id, a folder, or package:<name>==<version>.")
        parser.add_argument("--revision", help="Of a hub id.")
        parser.add_argument("--served-model-name", help="The checkpoint's name in answers; default: the source's.")
        parser.add_argument("--dtype", choices=[str(value) for value in BaseModel.Dtype.values])
        parser.add_argument("--max-model-len", type=int, help="Lowers the context, in tokens.")
        parser.add_argument("--tensor-parallel-size", type=int, help="GPUs (or CPU sockets) that one engine spans.")
        parser.add_argument("--gpus", type=int, help="GPUs that one engine costs; default: the tensor parallel size.")
        parser.add_argument("--usd-per-gpu-hour", type=_price, help="What the Spend limit counts; default: 0.")
        parser.add_argument("--kv-cache-gib", type=float, help="Memory for keys and values, in GiB.")
        parser.add_argument("--max-num-seqs", type=int, help="Sequences that an engine runs at once.")
        parser.add_argument("--harvest", action=argparse.BooleanOptionalAction, help="Take Harvest jobs (default).")
        parser.add_argument(
            "--arg", action="append", metavar="KEY=VALUE", help="A vLLM engine argument of the allow-list; repeatable."
        )
        parser.add_argument("--update", action="store_true", help="Change the model NAME, and read its files again.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            model = self._save(options["name"], options["source"], _fields(options), update=options["update"])
        except CheckpointError as error:
            raise CommandError(str(error)) from error
        except ValidationError as error:
            raise CommandError(" ".join(_sentences(error))) from error
        self.stdout.write(
            f"{model.name}: {model.served_model_name}, {model.n_layers} layers, hidden size {model.hidden_size}, "
            f"context {model.effective_max_model_len} tokens, {model.activation_dtype}."
        )

    def _save(self, name: str, source: str | None, fields: dict[str, Any], *, update: bool) -> BaseModel:
        if update:
            model = BaseModel.objects.filter(name=name).first()
            if model is None:
                raise CommandError(f"There is no model {name}.")
            changes = fields | ({"source": source} if source else {})
            before = {field: getattr(model, field) for field in changes}
            model = update_model(model=model, refresh=True, on_progress=self._progress, **changes)
            changed = [f"{field}: {before[field]} → {getattr(model, field)}" for field in changes]
            note_command(f"{'; '.join(['Files read again', *changed])}.", on=model)
            return model
        if not source:
            raise CommandError("--source is required.")
        model = add_model(name=name, source=source, on_progress=self._progress, **fields)
        note_command("Added.", on=model, added=True)
        return model

    def _progress(self, text: str) -> None:
        self.stderr.write(text)


def _price(text: str) -> Decimal:
    """Return an amount; what Decimal raises is no ValueError, which argparse waits for."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of USD such as 2.5") from None


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """The model's fields that the command line names."""
    names = ("revision", "served_model_name", "dtype", "max_model_len", "tensor_parallel_size", "max_num_seqs") + (
        "gpus",
        "usd_per_gpu_hour",
    )
    fields = {name: options[name] for name in names if options[name] is not None}
    if options["harvest"] is not None:
        fields["has_harvest"] = options["harvest"]
    if options["kv_cache_gib"] is not None:
        # Not `<= 0`: a NaN must fail too.
        if not 0 < options["kv_cache_gib"] < 1_000_000:
            raise CommandError("--kv-cache-gib must be over 0.")
        fields["kv_cache_bytes"] = int(options["kv_cache_gib"] * GIB)
    if options["arg"]:
        fields["extra_args"] = dict(parse_engine_arg(text) for text in options["arg"])
    return fields


def _sentences(error: ValidationError) -> list[str]:
    if not hasattr(error, "error_dict"):
        return error.messages
    return [
        message if field == "__all__" else f"{field}: {message}"
        for field, messages in error.message_dict.items()
        for message in messages
    ]
