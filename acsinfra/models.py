"""What the installation remembers about itself."""

from django.conf import settings
from django.db import models
from django.db.models import Q


class StorageFolder(models.Model):
    """The storage folder that the API wrote to first, by the marker file in it.

    Another host may have a folder of the same name that nobody shares: a worker there must not write to it.
    """

    url = models.CharField(max_length=1000, unique=True)
    marker = models.CharField(max_length=36)
    host = models.CharField(max_length=255, help_text="Where the API ran that recorded it.")
    recorded_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"storage folder recorded by {self.host}"


class IdempotencyKey(models.Model):
    """What became of a request with an Idempotency-Key; written by `acsinfra.core.idempotency` alone.

    It names a Job or Harvest job (`work_id`), or is a Completion that process `holder` answers as its request
    `reference`, until `status` is set: then it holds the answer, in `body` or, a large one, in storage (`file`).
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=255)
    fingerprint = models.BinaryField(max_length=32, help_text="SHA-256 of the route and the request's JSON value.")
    created_at = models.DateTimeField(db_index=True)
    work_id = models.UUIDField(null=True)
    holder = models.CharField(max_length=100, blank=True)
    reference = models.CharField(max_length=100, blank=True)
    status = models.PositiveSmallIntegerField(null=True)
    headers = models.JSONField(default=dict)
    body = models.BinaryField(null=True)
    file = models.CharField(max_length=200, blank=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["id"], condition=Q(status__isnull=True) & ~Q(holder=""), name="acsinfra_idempotency_running"
            )
        ]
        constraints = [
            models.UniqueConstraint(fields=["user", "key"], name="acsinfra_idempotency_one_a_key"),
            models.CheckConstraint(
                condition=Q(
                    work_id__isnull=False, holder="", reference="", status__isnull=True, body__isnull=True, file=""
                )
                | (
                    Q(work_id__isnull=True)
                    & ~Q(holder="")
                    & ~Q(reference="")
                    & (
                        Q(status__isnull=True, body__isnull=True, file="")
                        | Q(status__isnull=False, body__isnull=False, file="")
                        | (Q(status__isnull=False, body__isnull=True) & ~Q(file=""))
                    )
                ),
                name="acsinfra_idempotency_legal_state",
            ),
        ]

    def __str__(self) -> str:
        return f"idempotency key of {self.user}"


class RequestCount(models.Model):
    """The answered requests of one hour (UTC) that are of one kind; `core.traffic` writes it.

    `bucket` says how long they took: at most `traffic.BUCKETS[bucket]` seconds, or longer than all of those. `seconds`
    is the sum of their times.
    """

    hour = models.DateTimeField()
    route = models.CharField(max_length=200)
    method = models.CharField(max_length=10)
    status = models.PositiveSmallIntegerField()
    code = models.CharField(max_length=50, blank=True)
    bucket = models.PositiveSmallIntegerField()
    requests = models.PositiveBigIntegerField()
    seconds = models.FloatField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["hour", "route", "method", "status", "code", "bucket"], name="acsinfra_requestcount_one_an_hour"
            )
        ]

    def __str__(self) -> str:
        return f"{self.method} {self.route} {self.status} {self.code}, {self.hour:%Y-%m-%d %H}:00"
