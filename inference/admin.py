"""Base models and engines in the admin. A model's facts are read from its checkpoint when it is saved."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import PROTECT, QuerySet
from django.http import HttpRequest
from django.utils import timezone

from acsinfra.core.admin import COUNTED_AT_MOST, PlatformAdmin, ReadOnly, operator_action, words_of
from inference.checkpoints import CheckpointError, checkpoint_folder, read_checkpoint_facts
from inference.engine_args import ALLOWED
from inference.models import BaseModel, Engine
from inference.services import CHANGEABLE_FIELDS, add_model, set_enabled, update_model

FACTS = ("n_layers", "hidden_size", "vocab_size", "context_length", "bos_token_id", "activation_dtype", "load_seconds")


class BaseModelForm(forms.ModelForm[BaseModel]):
    """Checks that the checkpoint can be read before anything is saved."""

    class Meta:
        model = BaseModel
        fields = (
            "name",
            "source",
            "revision",
            "served_model_name",
            "is_enabled",
            "has_harvest",
            "dtype",
            "max_model_len",
            "tensor_parallel_size",
            "gpus",
            "usd_per_gpu_hour",
            "kv_cache_bytes",
            "max_num_seqs",
            "extra_args",
        )
        help_texts = {"extra_args": "Allowed: " + ", ".join(ALLOWED)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["served_model_name"].required = False

    def clean(self) -> dict[str, Any]:
        """Read the checkpoint of a new or changed source, so that the model's own checks know its facts."""
        cleaned = super().clean() or self.cleaned_data
        if self.errors or not ({"source", "revision", "dtype"} & set(self.changed_data)):
            return cleaned
        try:
            facts = read_checkpoint_facts(checkpoint_folder(cleaned["source"], revision=cleaned["revision"]))
        except CheckpointError as error:
            raise ValidationError({"source": str(error)}) from error
        if cleaned["dtype"] == BaseModel.Dtype.AUTO and facts.dtype is None:
            raise ValidationError({"dtype": "The checkpoint names none that activations come in; choose one."})
        self.instance.n_layers, self.instance.hidden_size = facts.n_layers, facts.hidden_size
        self.instance.vocab_size, self.instance.context_length = facts.vocab_size, facts.context_length
        self.instance.activation_dtype = str(facts.dtype if cleaned["dtype"] == "auto" else cleaned["dtype"])
        return cleaned


@admin.register(BaseModel)
class BaseModelAdmin(PlatformAdmin[BaseModel]):
    """Adds, changes, switches and removes Base models through the services that the commands use."""

    form = BaseModelForm
    list_display = (
        "name",
        "served_model_name",
        "is_enabled",
        "has_harvest",
        "usd_per_gpu_hour",
        "n_layers",
        "context",
    )
    list_filter = ("is_enabled", "has_harvest")
    search_fields = ("name", "source", "served_model_name")
    readonly_fields = FACTS
    search_help_text = "Part of a name or a source."
    actions = ("enable", "disable", "take_harvests", "refuse_harvests")
    sortable_by = ("name",)
    fieldsets = (
        (None, {"fields": ("name", "source", "revision", "served_model_name", ("is_enabled", "has_harvest"))}),
        (
            "Engine",
            {
                "fields": (
                    "dtype",
                    "max_model_len",
                    "tensor_parallel_size",
                    "max_num_seqs",
                    "kv_cache_bytes",
                    "extra_args",
                )
            },
        ),
        ("Price", {"fields": (("gpus", "usd_per_gpu_hour"),)}),
        ("Read from its checkpoint", {"fields": FACTS}),
    )

    @admin.display(description="context")
    def context(self, model: BaseModel) -> int:
        """The context that requests have, in tokens."""
        return model.effective_max_model_len

    def get_readonly_fields(self, request: HttpRequest, obj: BaseModel | None = None) -> tuple[str, ...]:
        """Keep the name of a model: requests, queues and jobs are called by it."""
        return FACTS if obj is None else ("name", *FACTS)

    def get_deleted_objects(
        self, objs: Sequence[BaseModel] | QuerySet[BaseModel], request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[str]]:
        """What stands in the way of a deletion, counted: Django would read every Job of the model, and list it."""
        (model,) = objs
        in_the_way = []
        for relation in BaseModel._meta.related_objects:
            rows: Any = relation.related_model
            if relation.on_delete is not PROTECT and rows is not Engine:
                continue
            found = rows._default_manager.filter(base_model=model).order_by()[: COUNTED_AT_MOST + 1].count()
            if found:
                count = f"more than {COUNTED_AT_MOST:,}" if found > COUNTED_AT_MOST else f"{found:,}"
                instead = "stop them first" if rows is Engine else "switch the model off instead"
                in_the_way.append(f"{words_of(str(rows._meta.verbose_name_plural))}: {count}; {instead}")
        return [f"{model}, with what was read from its checkpoint"], {"Base models": 1}, set(), in_the_way

    def save_model(self, request: HttpRequest, obj: BaseModel, form: Any, change: bool) -> None:
        """Save through the services."""
        fields = {name: form.cleaned_data[name] for name in form.changed_data if name in CHANGEABLE_FIELDS}
        if not change:
            saved = add_model(name=obj.name, source=fields.pop("source"), **fields)
        else:
            saved = update_model(model=BaseModel.objects.get(pk=obj.pk), **fields)
        obj.__dict__.update(saved.__dict__)

    @operator_action("Switch on")
    def enable(self, request: HttpRequest, model: BaseModel) -> str | None:
        """Have the API know the model."""
        return _switch(model, enabled=True)

    @operator_action(
        "Switch off",
        question="Switch these models off? The API knows them no more, and Jobs that wait for them fail; what runs "
        "goes on.",
    )
    def disable(self, request: HttpRequest, model: BaseModel) -> str | None:
        """Take the model out of the API."""
        return _switch(model, enabled=False)

    @operator_action("Take Harvest jobs")
    def take_harvests(self, request: HttpRequest, model: BaseModel) -> str | None:
        """Take Harvest jobs for the model."""
        return _switch_harvest(model, enabled=True)

    @operator_action(
        "Take no Harvest jobs", question="Refuse new Harvest jobs for these models? Those that are there go on."
    )
    def refuse_harvests(self, request: HttpRequest, model: BaseModel) -> str | None:
        """Refuse new Harvest jobs for the model."""
        return _switch_harvest(model, enabled=False)


def _switch(model: BaseModel, *, enabled: bool) -> str | None:
    if model.is_enabled == enabled:
        return None
    set_enabled(model=model, enabled=enabled)
    return f"Switched {'on' if enabled else 'off'}."


def _switch_harvest(model: BaseModel, *, enabled: bool) -> str | None:
    if model.has_harvest == enabled:
        return None
    update_model(model=model, has_harvest=enabled)
    return f"Harvest switched {'on' if enabled else 'off'}."


@admin.register(Engine)
class EngineAdmin(ReadOnly, PlatformAdmin[Engine]):
    """The inference engines and runners that run now; they write these rows themselves."""

    list_display = ("base_model", "kind", "state", "host", "pid", "gpus", "started_at", "loaded_in", "beat")
    list_filter = ("kind", "status", "base_model")
    list_select_related = ("base_model",)
    ordering = ("base_model__name", "kind", "started_at")

    @admin.display(description="status")
    def state(self, engine: Engine) -> str:
        """`starting`, `live`, or `silent` where its heartbeat has stopped."""
        is_silent = timezone.now() - engine.heartbeat_at > settings.ENGINE_SILENT_AFTER
        return "silent" if is_silent else engine.status

    @admin.display(description="loaded in")
    def loaded_in(self, engine: Engine) -> str:
        """How long it took until it served."""
        return f"{(engine.live_at - engine.started_at).total_seconds():.0f} s" if engine.live_at else "loading"

    @admin.display(description="last heartbeat")
    def beat(self, engine: Engine) -> str:
        """How long ago it was last heard of."""
        return f"{max(0.0, (timezone.now() - engine.heartbeat_at).total_seconds()):.0f} s ago"
