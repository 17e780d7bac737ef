"""What changes Base models and the registry of engines."""

import hashlib
import os
import socket
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, cast

import zstandard
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import ProtectedError, RestrictedError
from django.db.models.functions import Now

from budgets.spend import record_gpu_time
from inference.checkpoints import CheckpointError, CheckpointFacts, checkpoint_folder, read_checkpoint_facts
from inference.models import BaseModel, CheckpointFiles, Engine
from inference.wire import EngineOptions

# Changing one of these means another checkpoint, or another reading of it.
CHECKPOINT_FIELDS: Final = frozenset({"source", "revision", "dtype"})
CHANGEABLE_FIELDS: Final = CHECKPOINT_FIELDS | {
    "served_model_name",
    "is_enabled",
    "has_harvest",
    "max_model_len",
    "tensor_parallel_size",
    "gpus",
    "usd_per_gpu_hour",
    "kv_cache_bytes",
    "max_num_seqs",
    "extra_args",
}


def add_model(*, name: str, source: str, on_progress: Callable[[str], None] | None = None, **fields: Any) -> BaseModel:
    """Add a Base model, with the facts that its checkpoint tells; `fields` are further fields of BaseModel.

    A folder's path is kept absolute. Raises CheckpointError when the source can't be read, ValidationError for a
    field that is wrong or a name that is taken.
    """
    model = BaseModel(name=name, source=_whole_source(source), **_only_changeable(fields))
    model.served_model_name = model.served_model_name or _checkpoint_name(source)
    facts = _read_facts(model, on_progress=on_progress)
    with transaction.atomic():
        _take_facts(model, facts)
        model.full_clean()
        model.save(force_insert=True)
        _keep_files(model, facts)
    return model


def update_model(
    *, model: BaseModel, refresh: bool = False, on_progress: Callable[[str], None] | None = None, **changes: Any
) -> BaseModel:
    """Change fields of `model`; reads the checkpoint again when they name another, or with `refresh`.

    Engines that run keep what they loaded until they start again. Raises as `add_model` does.
    """
    changes = _only_changeable(changes)
    if "source" in changes:
        changes["source"] = _whole_source(changes["source"])
    reread = refresh or any(name in changes and changes[name] != getattr(model, name) for name in CHECKPOINT_FIELDS)
    for name, value in changes.items():
        setattr(model, name, value)
    facts = _read_facts(model, on_progress=on_progress) if reread else None
    with transaction.atomic():
        if facts:
            _take_facts(model, facts)
        model.full_clean()
        if not facts:
            model.save(update_fields=list(changes))
        else:
            model.save()
            _keep_files(model, facts)
    return model


def set_enabled(*, model: BaseModel, enabled: bool) -> None:
    """Switch a model on or off; off, the API does not know it."""
    BaseModel.objects.filter(pk=model.pk).update(is_enabled=enabled)
    model.is_enabled = enabled


def remove_model(*, model: BaseModel) -> None:
    """Delete a model and its engines' rows; raises ValidationError while other rows need it."""
    try:
        model.delete()
    except (ProtectedError, RestrictedError) as error:
        raise ValidationError(f"{model.name} has jobs; switch it off instead.") from error


def engine_options(*, model: BaseModel, checkpoint: str) -> EngineOptions:
    """How an engine loads `model` from `checkpoint` (a folder or a hub id).

    The dtype is always said: vLLM's own "auto" turns a float32 checkpoint into bfloat16.
    """
    return EngineOptions(
        checkpoint=checkpoint,
        dtype=cast("Any", model.activation_dtype),
        max_model_len=model.effective_max_model_len,
        tensor_parallel_size=model.tensor_parallel_size,
        kv_cache_bytes=model.kv_cache_bytes,
        max_num_seqs=model.max_num_seqs,
        revision=model.revision or None,
        extra_args=dict(model.extra_args),
    )


def register_engine(*, model: BaseModel, kind: Engine.Kind, pid: int | None = None) -> Engine:
    """Write the row of an engine that starts in this process, `starting` until `mark_live`; its GPU time begins.

    `pid` is of the process that an operator would stop, where that is another one around this.
    """
    engine = Engine.objects.create(
        base_model=model,
        kind=kind,
        host=socket.gethostname()[:255],
        pid=pid or os.getpid(),
        gpus=model.gpu_count,
        heartbeat_at=Now(),
    )
    _record_gpu_time(engine)
    return engine


def heartbeat(*, engine: Engine) -> bool:
    """Say that the engine is alive, by the database's clock, and record its GPU time until now.

    Writes its row anew when it was swept in a long silence. False when the model itself was removed: the engine has
    nothing left to serve.
    """
    if not Engine.objects.filter(pk=engine.pk).update(heartbeat_at=Now()):
        try:
            _write_again(engine)
        except IntegrityError:
            return False
    _record_gpu_time(engine)
    return True


def mark_live(*, engine: Engine) -> None:
    """The engine serves from now on; an inference engine's load time becomes its model's estimate."""
    with transaction.atomic():
        _change(engine, status=Engine.Status.LIVE, live_at=Now())
        if engine.kind == Engine.Kind.INFERENCE and engine.live_at:
            seconds = (engine.live_at - engine.started_at).total_seconds()
            BaseModel.objects.filter(pk=engine.base_model_id).update(load_seconds=seconds)


def mark_starting(*, engine: Engine) -> None:
    """The engine loads again, after it died under its worker."""
    with transaction.atomic():
        _change(engine, status=Engine.Status.STARTING, live_at=None, started_at=Now())


def leave_engine(*, engine: Engine) -> None:
    """Take the row of an engine that stops away, and record its GPU time to the end."""
    _record_gpu_time(engine)
    Engine.objects.filter(pk=engine.pk).delete()


def sweep_silent_engines() -> int:
    """Delete the rows whose heartbeat is older than `settings.ENGINE_SILENT_AFTER`; returns how many."""
    deleted, _ = Engine.objects.filter(heartbeat_at__lt=Now() - settings.ENGINE_SILENT_AFTER).delete()
    return deleted


def _change(engine: Engine, **changes: Any) -> None:
    changes["heartbeat_at"] = Now()
    if not Engine.objects.filter(pk=engine.pk).update(**changes):
        _write_again(engine)
        Engine.objects.filter(pk=engine.pk).update(**changes)
    engine.refresh_from_db()


def _record_gpu_time(engine: Engine) -> None:
    # The price is read each time: one that an operator sets must count for engines that run already.
    row = BaseModel.objects.filter(pk=engine.base_model_id).values_list("name", "usd_per_gpu_hour").first()
    if row is not None:
        name, price = row
        record_gpu_time(
            engine_id=engine.pk, model=name, kind=str(engine.kind), gpus=engine.gpus, usd_per_gpu_hour=price
        )


def _write_again(engine: Engine) -> None:
    # A copy by ids: the model that the engine's instance points to may be gone.
    row = Engine(
        pk=engine.pk,
        base_model_id=engine.base_model_id,
        kind=engine.kind,
        status=engine.status,
        host=engine.host,
        pid=engine.pid,
        gpus=engine.gpus,
        live_at=engine.live_at,
        heartbeat_at=Now(),
    )
    with transaction.atomic():
        row.save(force_insert=True)
        # auto_now_add has set it to now.
        Engine.objects.filter(pk=engine.pk).update(started_at=engine.started_at)


def _only_changeable(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in CHANGEABLE_FIELDS:
            raise ValidationError(f"{name} can't be set.")
    price = fields.get("usd_per_gpu_hour")
    # Django's own validators fail on one that is not finite, instead of refusing it.
    if isinstance(price, Decimal | float) and not Decimal(price).is_finite():
        raise ValidationError({"usd_per_gpu_hour": "This must be a finite amount."})
    return fields


def _whole_source(source: str) -> str:
    return str(Path(source).resolve()) if source and Path(source).is_dir() else source


def _checkpoint_name(source: str) -> str:
    if source.startswith("package:"):
        return source.removeprefix("package:").partition("==")[0]
    return Path(source).resolve().name if Path(source).is_dir() else source


def _read_facts(model: BaseModel, *, on_progress: Callable[[str], None] | None) -> CheckpointFacts:
    facts = read_checkpoint_facts(checkpoint_folder(model.source, revision=model.revision, on_progress=on_progress))
    if model.dtype == BaseModel.Dtype.AUTO and facts.dtype is None:
        raise CheckpointError(
            "The checkpoint's config.json names no dtype that activations come in; choose bfloat16, float16 or float32."
        )
    return facts


def _take_facts(model: BaseModel, facts: CheckpointFacts) -> None:
    model.n_layers, model.hidden_size = facts.n_layers, facts.hidden_size
    model.vocab_size, model.context_length = facts.vocab_size, facts.context_length
    model.bos_token_id = facts.bos_token_id
    model.activation_dtype = str(facts.dtype if model.dtype == BaseModel.Dtype.AUTO else model.dtype)


def _keep_files(model: BaseModel, facts: CheckpointFacts) -> None:
    CheckpointFiles.objects.update_or_create(
        base_model=model,
        defaults={
            "config": facts.config,
            "tokenizer_zstd": zstandard.ZstdCompressor(level=9).compress(facts.tokenizer),
            "sha256": hashlib.sha256(facts.tokenizer).hexdigest(),
        },
    )
