"""Completion Jobs, what each asks for, and what it gave."""

from typing import ClassVar

from django.db import models
from django.db.models import Q

from accounts.models import ApiKey, User
from acsinfra.core.leases import LeasedWork, lease_constraints
from inference.models import BaseModel


class CompletionJob(LeasedWork):
    """One Completion that runs on the server.

    `hold_tokens` are held from the first claim to the end; `hold_id` is that Hold, kept while the Job waits to run
    again. `counted_tokens` is the last count that a worker reported (null: none yet), `charged_tokens` what the end
    charged. The columns of a lease: `LeasedWork`.
    """

    WAITING: ClassVar[str] = "queued"
    AGE: ClassVar[str] = "created_at, id"
    FRONT: ClassVar[int] = 500

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="completion_jobs", db_index=False)
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, related_name="completion_jobs")
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="completion_jobs", db_index=False)
    model = models.CharField(max_length=100, help_text="The Base model's name when the Job was submitted.")
    status = models.CharField(max_length=10, choices=Status, default=Status.QUEUED)

    hold_tokens = models.PositiveBigIntegerField()
    hold_id = models.UUIDField(null=True, editable=False)
    counted_tokens = models.PositiveBigIntegerField(null=True, editable=False)
    charged_tokens = models.PositiveBigIntegerField(null=True, editable=False)

    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, editable=False)
    finished_at = models.DateTimeField(null=True, editable=False)
    expires_at = models.DateTimeField(null=True, editable=False)
    cancel_requested_at = models.DateTimeField(null=True, editable=False)
    has_files = models.BooleanField(default=False, editable=False)
    is_erased = models.BooleanField(default=False, editable=False, help_text="Whether its expired result is gone.")

    class Meta:
        verbose_name = "Completion Job"
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["user", "-id"], name="completion_job_of_user"),
            # Also counts the unfinished ones.
            models.Index(fields=["user", "status", "-id"], name="completion_job_of_user_status"),
            models.Index(
                fields=["base_model", "status", "user", "created_at", "id"],
                condition=Q(status__in=["queued", "running"]),
                name="completion_job_order_of_work",
            ),
            models.Index(
                fields=["base_model", "created_at", "id"],
                condition=Q(status="queued", lease_owner__isnull=True),
                name="completion_job_front",
            ),
            models.Index(fields=["user"], condition=Q(status="running"), name="completion_job_running"),
            models.Index(fields=["expires_at"], condition=Q(is_erased=False), name="completion_job_expiry"),
            # For operators, who look for what did not succeed among years of what did.
            models.Index(
                fields=["status", "-id"],
                condition=Q(status__in=["failed", "cancelled"]),
                name="completion_job_unsuccessful",
            ),
        ]
        constraints = [
            *lease_constraints("completion_job", running="running"),
            models.CheckConstraint(
                condition=Q(status__in=["queued", "running", "succeeded", "failed", "cancelled"]),
                name="completion_job_legal_status",
            ),
            models.CheckConstraint(
                condition=Q(
                    status__in=["queued", "running"],
                    finished_at__isnull=True,
                    expires_at__isnull=True,
                    charged_tokens__isnull=True,
                    is_erased=False,
                )
                | Q(
                    status__in=["succeeded", "failed", "cancelled"],
                    finished_at__isnull=False,
                    expires_at__isnull=False,
                    charged_tokens__isnull=False,
                ),
                name="completion_job_end_has_time_and_charge",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=["running", "succeeded"]) | Q(started_at__isnull=False),
                name="completion_job_run_has_its_start",
            ),
            models.CheckConstraint(
                condition=~Q(status="succeeded") | Q(hold_id__isnull=False), name="completion_job_success_had_its_hold"
            ),
            models.CheckConstraint(
                condition=Q(status="running")
                | Q(status="cancelled", cancel_requested_at__isnull=False)
                | Q(status__in=["queued", "succeeded", "failed"], cancel_requested_at__isnull=True),
                name="completion_job_cancel_is_kept",
            ),
        ]

    def __str__(self) -> str:
        return f"Completion Job {self.id}"

    @property
    def is_ended(self) -> bool:
        """Whether it is succeeded, failed or cancelled."""
        return self.status not in (self.Status.QUEUED, self.Status.RUNNING)

    @property
    def request_id(self) -> str:
        """`req_job_` and the 32 hex digits of its id."""
        return f"req_job_{self.id.hex}"

    @property
    def storage_prefix(self) -> str:
        """Where all its files are, below this key."""
        return f"jobs/{self.id}"


class JobRequest(models.Model):
    """What a Job asks for, kept as long as its result: an `inference.wire.CompletionWork` as JSON, zstd-compressed."""

    job = models.OneToOneField(CompletionJob, on_delete=models.CASCADE, related_name="request", primary_key=True)
    work_zstd = models.BinaryField()

    def __str__(self) -> str:
        return f"request of {self.job_id}"


class JobResult(models.Model):
    """What a succeeded or failed Job answers: `status`, and the JSON of the body, here or in storage under `key`."""

    job = models.OneToOneField(CompletionJob, on_delete=models.CASCADE, related_name="result", primary_key=True)
    status = models.PositiveSmallIntegerField()
    body = models.BinaryField(null=True)
    key = models.CharField(max_length=200, blank=True)
    bytes = models.PositiveBigIntegerField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(body__isnull=False, key="") | Q(body__isnull=True) & ~Q(key=""),
                name="job_result_is_in_one_place",
            )
        ]

    def __str__(self) -> str:
        return f"result of {self.job_id}"
