"""Base models and engines in the admin. A model's facts are read from its checkpoint when it is saved."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest

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
class BaseModelAdmin(admin.ModelAdmin[BaseModel]):
    """Adds, changes, switches and removes Base models through the services that the commands use."""

    form = BaseModelForm
    list_display = ("name", "served_model_name", "is_enabled", "has_harvest", "activation_dtype", "n_layers", "context")
    list_filter = ("is_enabled", "has_harvest")
    search_fields = ("name", "source", "served_model_name")
    readonly_fields = FACTS
    actions = ("enable", "disable")

    @admin.display(description="context")
    def context(self, model: BaseModel) -> int:
        """The context that requests have, in tokens."""
        return model.effective_max_model_len

    def get_readonly_fields(self, request: HttpRequest, obj: BaseModel | None = None) -> tuple[str, ...]:
        """Keep the name of a model: requests, queues and jobs are called by it."""
        return FACTS if obj is None else ("name", *FACTS)

    def save_model(self, request: HttpRequest, obj: BaseModel, form: Any, change: bool) -> None:
        """Save through the services."""
        fields = {name: form.cleaned_data[name] for name in form.changed_data if name in CHANGEABLE_FIELDS}
        if not change:
            saved = add_model(name=obj.name, source=fields.pop("source"), **fields)
        else:
            saved = update_model(model=BaseModel.objects.get(pk=obj.pk), **fields)
        obj.__dict__.update(saved.__dict__)

    @admin.action(description="Switch on")
    def enable(self, request: HttpRequest, queryset: QuerySet[BaseModel]) -> None:
        """Switch the chosen models on."""
        self._switch(request, queryset, enabled=True)

    @admin.action(description="Switch off")
    def disable(self, request: HttpRequest, queryset: QuerySet[BaseModel]) -> None:
        """Switch the chosen models off."""
        self._switch(request, queryset, enabled=False)

    def _switch(self, request: HttpRequest, queryset: QuerySet[BaseModel], *, enabled: bool) -> None:
        for model in queryset:
            set_enabled(model=model, enabled=enabled)
        messages.success(request, f"{len(queryset)} switched {'on' if enabled else 'off'}.")


@admin.register(Engine)
class EngineAdmin(admin.ModelAdmin[Engine]):
    """The engines that run now; they write these rows themselves."""

    list_display = ("base_model", "kind", "status", "host", "pid", "started_at", "live_at", "heartbeat_at")
    list_filter = ("kind", "status")
    list_select_related = ("base_model",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: an engine registers itself."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Engine | None = None) -> bool:
        """Never: an engine's row is its own."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Engine | None = None) -> bool:
        """Never: an engine leaves or falls silent."""
        return False
