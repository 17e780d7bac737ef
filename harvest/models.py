"""Harvest jobs, their prompts and their shards."""

from typing import Any, Final

from django.db import models
from django.db.models import F, Q

from accounts.models import ApiKey, User
from acsinfra.core.ids import new_uuid7
from acsinfra.core.leases import LeasedWork, lease_constraints
from budgets.models import Hold
from inference.models import BaseModel

PROMPTS_AT_MOST: Final = 4096


class HarvestJob(LeasedWork):
    """A corpus whose residual stream is read into files.

    `layers` ascend. `reserved_tokens` are held from submit to end; `tokens` is what was charged, set with the end.
    `bytes_at_most` is what its files may come to; `bytes_written` what is in storage. `result` (of a done job) has
    `manifest_key` and `stats_key` with their `_bytes`, `bytes_written` and `timings`. The columns of a lease:
    `LeasedWork`.
    Its `hold` ends with it. A job that was submitted while no runner was registered has `runner_due_at`, until when
    one must come: None where the job was taken in.
    """

    class Status(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"
        CANCELLED = "cancelled"

    class Contents(models.TextChoices):
        ACTIVATIONS = "activations"
        PROJECTIONS = "projections"

    run_id = models.UUIDField(default=new_uuid7, unique=True, editable=False)
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="harvest_jobs", db_index=False)
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, related_name="harvest_jobs")
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="harvest_jobs", db_index=False)
    model = models.CharField(max_length=100, help_text="The Base model's name when the job was submitted.")
    status = models.CharField(max_length=10, choices=Status, default=Status.PENDING)

    layers: models.JSONField[list[int], list[int]] = models.JSONField()
    shard_size = models.PositiveIntegerField()
    batch_size = models.PositiveIntegerField(null=True)
    add_special_tokens = models.BooleanField()
    contents = models.CharField(max_length=11, choices=Contents, default=Contents.ACTIVATIONS)
    n_prompts = models.PositiveIntegerField()
    reserved_tokens = models.PositiveBigIntegerField()
    hold = models.OneToOneField(Hold, on_delete=models.SET_NULL, null=True, editable=False, related_name="harvest_job")
    bytes_at_most = models.PositiveBigIntegerField()

    created_at = models.DateTimeField(auto_now_add=True)
    runner_due_at = models.DateTimeField(null=True, editable=False)
    started_at = models.DateTimeField(null=True, editable=False)
    completed_at = models.DateTimeField(null=True, editable=False)
    tokens = models.PositiveBigIntegerField(null=True, editable=False)
    error = models.CharField(max_length=500, blank=True, editable=False)
    result: models.JSONField[dict[str, Any] | None, dict[str, Any] | None] = models.JSONField(null=True, editable=False)
    files_deleted_at = models.DateTimeField(null=True, editable=False)

    prompts_done = models.PositiveIntegerField(default=0, editable=False)
    tokens_done = models.PositiveBigIntegerField(default=0, editable=False)
    bytes_written = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta:
        verbose_name = "Harvest job"
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["user", "-id"], name="harvest_job_of_user"),
            models.Index(
                fields=["base_model", "status", "user", "id"],
                condition=Q(status__in=["pending", "running"]),
                name="harvest_job_order_of_work",
            ),
            models.Index(
                fields=["api_key"], condition=Q(status__in=["pending", "running"]), name="harvest_job_unfinished"
            ),
            models.Index(
                fields=["runner_due_at"], condition=Q(runner_due_at__isnull=False), name="harvest_job_runner_due"
            ),
            models.Index(
                fields=["status", "completed_at"], condition=Q(files_deleted_at__isnull=True), name="harvest_job_files"
            ),
        ]
        constraints = [
            *lease_constraints("harvest_job", running="running"),
            models.CheckConstraint(
                condition=Q(status__in=["pending", "running", "done", "failed", "cancelled"]),
                name="harvest_job_legal_status",
            ),
            models.CheckConstraint(
                condition=Q(status__in=["pending", "running"], completed_at__isnull=True, tokens__isnull=True)
                | Q(status__in=["done", "failed", "cancelled"], completed_at__isnull=False, tokens__isnull=False),
                name="harvest_job_end_has_time_and_tokens",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=["running", "done"]) | Q(started_at__isnull=False),
                name="harvest_job_run_has_its_start",
            ),
            models.CheckConstraint(
                condition=Q(tokens__isnull=True) | Q(tokens__lte=F("reserved_tokens")),
                name="harvest_job_tokens_within_reserved",
            ),
            models.CheckConstraint(
                condition=Q(status="failed") & ~Q(error="") | ~Q(status="failed") & Q(error=""),
                name="harvest_job_failure_has_its_error",
            ),
            models.CheckConstraint(
                condition=Q(status="done", result__isnull=False) | ~Q(status="done") & Q(result__isnull=True),
                name="harvest_job_done_has_its_result",
            ),
            models.CheckConstraint(
                condition=Q(
                    n_prompts__gte=1,
                    n_prompts__lte=PROMPTS_AT_MOST,
                    shard_size__gte=1,
                    shard_size__lte=PROMPTS_AT_MOST,
                ),
                name="harvest_job_sizes",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=["pending", "running"]) | Q(files_deleted_at__isnull=True),
                name="harvest_job_files_live_while_it_runs",
            ),
        ]

    def __str__(self) -> str:
        return f"Harvest job {self.id}"

    @property
    def is_ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.status not in (self.Status.PENDING, self.Status.RUNNING)

    @property
    def storage_prefix(self) -> str:
        """Where all its files are, below this key."""
        return f"harvest/{self.run_id}"

    @property
    def claim_prefix(self) -> str:
        """Where the claim that runs now writes its files.

        Each claim has a place of its own, so that a runner that lost its lease without knowing overwrites nothing.
        """
        return self.storage_prefix if self.claims <= 1 else f"{self.storage_prefix}/claim_{self.claims}"


class HarvestCorpus(models.Model):
    """What a Harvest job reads, apart from its row: the prompts, and the directions to project onto.

    `prompts_zstd` is a zstd-compressed JSON list of texts; `directions` float32 little-endian [directions, hidden].
    """

    job = models.OneToOneField(HarvestJob, on_delete=models.CASCADE, related_name="corpus", primary_key=True)
    prompts_zstd = models.BinaryField()
    directions = models.BinaryField(null=True)

    def __str__(self) -> str:
        return f"corpus of {self.job_id}"


class HarvestShard(models.Model):
    """A shard that is whole in storage, with the key of its sums: a run that begins again does not compute it again."""

    job = models.ForeignKey(HarvestJob, on_delete=models.CASCADE, related_name="shards")
    index = models.PositiveIntegerField()
    key = models.CharField(max_length=200)
    bytes = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    sums_key = models.CharField(max_length=200)

    class Meta:
        ordering = ["index"]
        constraints = [models.UniqueConstraint(fields=["job", "index"], name="harvest_shard_once")]

    def __str__(self) -> str:
        return f"shard {self.index} of {self.job_id}"


class FilesToDelete(models.Model):
    """Files in storage that no job needs any more, written in the transaction that let go of them.

    The scheduler deletes them, not before `not_before`: a runner that was just cancelled may be writing still.
    """

    prefix = models.CharField(max_length=200, unique=True)
    not_before = models.DateTimeField()

    class Meta:
        verbose_name_plural = "files to delete"

    def __str__(self) -> str:
        return self.prefix
