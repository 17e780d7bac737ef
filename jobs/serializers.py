"""The body of `POST /v1/completion-jobs`, and Jobs as JSON."""

from datetime import datetime
from typing import Any

from django.utils import timezone
from rest_framework import serializers

from acsinfra.core.times import iso_utc_ms
from inference.serializers import CompletionRequestSerializer
from jobs.models import CompletionJob


class CompletionJobRequestSerializer(CompletionRequestSerializer):
    """A body of `POST /v1/completions`, without `stream` or with `"stream": false`."""


class CompletionJobSerializer(serializers.Serializer[Any]):
    """A Job, as every route answers it."""

    id = serializers.UUIDField(help_text="A UUIDv7: later Jobs sort later.")
    request_id = serializers.CharField(help_text="The id to send when you report a problem with this Job.")
    model = serializers.CharField(help_text="The Base model, as the request named it.")
    status = serializers.ChoiceField(
        choices=CompletionJob.Status.choices,
        help_text="queued and running until the Job ends. Then succeeded when its Completion answered 200, failed when "
        "it answered an error, or cancelled.",
    )
    cancel_requested = serializers.BooleanField(help_text="Whether the Job was cancelled.")
    created_at = serializers.DateTimeField(help_text="Such as 2026-11-02T18:35:05.226+00:00.")
    started_at = serializers.DateTimeField(allow_null=True, help_text="When it first started; null until then.")
    finished_at = serializers.DateTimeField(allow_null=True, help_text="When it ended; null until then.")
    expires_at = serializers.DateTimeField(
        allow_null=True, help_text="When its result expires, 30 days after it ended; null until then."
    )
    result_expired = serializers.BooleanField(help_text="Whether its result is gone.")
    status_url = serializers.CharField(help_text="The path of this Job.")
    result_url = serializers.CharField(help_text="The path of its result.")
    usage_pending = serializers.BooleanField(help_text="Whether it holds tokens of the Budget: true while it runs.")


class CompletionJobListSerializer(serializers.Serializer[Any]):
    """A page of Jobs, newest first."""

    object = serializers.ChoiceField(choices=["list"])
    data = CompletionJobSerializer(many=True)  # type: ignore[assignment]  # DRF's own `data` is a property
    has_more = serializers.BooleanField(help_text="Whether older ones follow: ask with after.")


def is_result_expired(job: CompletionJob) -> bool:
    """Whether the Job's result has expired, swept away yet or not."""
    return job.expires_at is not None and (job.is_erased or job.expires_at <= timezone.now())


def job_as_json(job: CompletionJob) -> dict[str, Any]:
    """The Job with the keys of `CompletionJobSerializer`."""
    path = f"/v1/completion-jobs/{job.pk}"
    return {
        "id": str(job.pk),
        "request_id": job.request_id,
        "model": job.model,
        "status": str(job.status),
        "cancel_requested": job.cancel_requested_at is not None,
        "created_at": iso_utc_ms(job.created_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
        "expires_at": _time(job.expires_at),
        "result_expired": is_result_expired(job),
        "status_url": path,
        "result_url": f"{path}/result",
        "usage_pending": job.hold_id is not None and not job.is_ended,
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else iso_utc_ms(moment)
