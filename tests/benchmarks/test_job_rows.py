"""The table of Jobs that `bench api` fills: its columns and constraints are those of today."""

import pytest

from jobs.models import CompletionJob, JobRequest, JobResult
from tests.benchmarks.job_rows import WAITING_OWNERS, fill, time_claims
from tests.harvest.conftest import make_model


@pytest.mark.django_db
def test_ended_and_waiting_jobs_are_inserted_and_claimed() -> None:
    make_model("parked")
    assert fill(model_name="parked", ended=300, waiting=200)["rows"] == 500
    assert CompletionJob.objects.filter(status="succeeded").count() == JobResult.objects.count() == 300
    waiting = CompletionJob.objects.filter(status="queued")
    assert waiting.count() == JobRequest.objects.count() == 200
    assert waiting.values("user").distinct().count() == WAITING_OWNERS
    claims = time_claims(model_name="parked", claims=3)
    assert claims["waiting"] == 200
    assert 0 < claims["claim"]["p50_ms"] <= claims["claim"]["p99_ms"]
    assert CompletionJob.objects.filter(status="running").count() == 6
