"""What becomes of a Job's row, its Hold and its result."""

import json
import uuid
from datetime import timedelta

import pytest
from django.db import IntegrityError
from django.utils import timezone

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.idempotency import idempotent_request
from acsinfra.core.leases import LeaseLostError
from budgets.limits import set_monthly_tokens
from budgets.models import Hold
from inference.models import BaseModel
from jobs import running, services
from jobs.models import CompletionJob, JobRequest, JobResult
from jobs.serializers import job_as_json
from jobs.services import Answer
from tests.harvest.conftest import make_key, make_model, make_user
from tests.jobs.conftest import (
    HOLD_TOKENS,
    OWNER,
    assert_money,
    claim,
    claimed,
    let_the_lease_run_out,
    submit,
    work_for,
)

pytestmark = pytest.mark.django_db(transaction=True)

ANSWER = Answer(status=200, body=b"{}", bytes=2)


def finish(job: CompletionJob, tokens: int = 7, owner: uuid.UUID = OWNER) -> CompletionJob:
    return running.finish_job(job_id=job.pk, owner=owner, tokens=tokens, answer=ANSWER)


def result_of(job: CompletionJob) -> tuple[int, dict[str, object]]:
    result = JobResult.objects.get(job=job)
    assert result.body is not None
    return result.status, json.loads(bytes(result.body))


def test_a_job_waits_without_a_hold_and_holds_when_it_runs(user: User, key: ApiKey, model: BaseModel) -> None:
    job = submit(user, key, model)
    assert (job.status, job.hold_id, job.started_at) == ("queued", None, None)
    assert job_as_json(job)["usage_pending"] is False
    assert not Hold.objects.exists()
    taken = claim(model)
    assert taken is not None
    assert taken.work == work_for(job.pk, model)
    job.refresh_from_db()
    assert (job.status, job.lease_owner, job.claims) == ("running", OWNER, 1)
    assert job.started_at is not None
    assert job_as_json(job)["usage_pending"] is True
    assert_money(user, used=0, held=HOLD_TOKENS)
    hold = Hold.objects.get()
    assert hold.pk == job.hold_id
    assert (hold.work_kind, hold.work_id, hold.key_use is not None) == ("job", str(job.pk), True)
    assert claim(model) is None


def test_a_finished_job_is_charged_what_was_counted_and_keeps_its_request_with_its_result(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    submit(user, key, model)
    job = finish(claimed(model))
    assert (job.status, job.charged_tokens, job.lease_owner) == ("succeeded", 7, None)
    assert job.finished_at is not None
    assert job.expires_at == job.finished_at + timedelta(days=30)
    assert result_of(job) == (200, {})
    assert JobRequest.objects.filter(pk=job.pk).exists()
    assert_money(user, used=7)


def test_a_job_whose_tokens_are_gone_by_its_turn_fails_and_the_next_one_runs(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    other = make_user("bob")
    late, next_one = submit(user, key, model), submit(other, make_key(other), model)
    set_monthly_tokens(user=user, monthly_tokens=5)
    taken = claim(model)
    assert taken is not None
    assert taken.id == next_one.pk
    late.refresh_from_db()
    assert (late.status, late.charged_tokens, late.hold_id) == ("failed", 0, None)
    status, body = result_of(late)
    assert status == 429
    assert body["error"]["code"] == "budget_exceeded"  # type: ignore[index]
    assert body["request_id"] == late.request_id == f"req_job_{late.pk.hex}"


def test_a_submit_without_room_or_place_makes_no_job(user: User, key: ApiKey, model: BaseModel) -> None:
    set_monthly_tokens(user=user, monthly_tokens=HOLD_TOKENS - 1)
    once = idempotent_request(user_id=user.pk, key="k", route="r", body={})
    with pytest.raises(ApiError) as refused:
        submit(user, key, model, request=once)
    assert refused.value.code is ErrorCode.BUDGET_EXCEEDED
    set_monthly_tokens(user=user, monthly_tokens=10**6)
    user.jobs_unfinished = 2
    user.save()
    # A refusal does not use the key up.
    first = submit(user, key, model, request=once)
    submit(user, key, model)
    with pytest.raises(ApiError) as refused:
        submit(user, key, model)
    assert (refused.value.code, refused.value.status) == (ErrorCode.JOB_CAPACITY, 429)
    # A retry of accepted work needs no place.
    assert submit(user, key, model, request=once).pk == first.pk
    assert CompletionJob.objects.count() == JobRequest.objects.count() == 2
    services.cancel_job(job_id=first.pk)
    submit(user, key, model)


def test_the_same_key_for_another_request_is_a_conflict(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model, request=idempotent_request(user_id=user.pk, key="k", route="r", body={"a": 1}))
    with pytest.raises(ApiError) as refused:
        submit(user, key, model, request=idempotent_request(user_id=user.pk, key="k", route="r", body={"a": 2}))
    assert refused.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert CompletionJob.objects.count() == 1


# Runs that end before their answer


def test_a_job_whose_worker_died_keeps_hold_and_start_and_runs_again(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = claimed(model)
    running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=5)], renew=True)
    assert services.end_expired_leases() == 0
    let_the_lease_run_out(job)
    assert services.end_expired_leases() == 1
    assert services.end_expired_leases() == 0
    waiting = CompletionJob.objects.get(pk=job.pk)
    assert (waiting.status, waiting.tries, waiting.hold_id) == ("queued", 1, job.hold_id)
    assert waiting.started_at == job.started_at
    assert job_as_json(waiting)["usage_pending"] is True
    second = uuid.UUID(int=2)
    again = claimed(model, second)
    assert (again.hold_id, again.started_at, again.claims) == (job.hold_id, job.started_at, 2)
    with pytest.raises(LeaseLostError):
        finish(job)
    finish(again, owner=second)
    assert_money(user, used=7)


def test_a_job_that_dies_three_times_fails_with_its_last_count(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    for number in range(3):
        job = claimed(model, uuid.UUID(int=number))
        running.fail_try(job_id=job.pk, owner=uuid.UUID(int=number), tokens=4 + number)
    job.refresh_from_db()
    assert (job.status, job.tries, job.charged_tokens) == ("failed", 3, 6)
    status, body = result_of(job)
    assert (status, body["error"]["code"]) == (500, "job_failed")  # type: ignore[index]
    assert claim(model) is None
    assert_money(user, used=6)


def test_a_job_that_its_worker_puts_back_costs_no_try(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    for _ in range(5):
        job = claimed(model)
        job = running.hand_back(job_id=job.pk, owner=OWNER, tokens=None)
        job.refresh_from_db()
        assert (job.status, job.tries) == ("queued", 0)
    assert_money(user, used=0, held=HOLD_TOKENS)


def test_jobs_of_a_model_that_is_switched_off_fail_and_running_ones_go_on(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    submit(user, key, model)
    job = claimed(model)
    waiting, later = submit(user, key, model), submit(user, key, make_model("other"))
    BaseModel.objects.filter(pk=model.pk).update(is_enabled=False)
    assert services.fail_jobs_of_switched_off_models() == 1
    assert services.fail_jobs_of_switched_off_models() == 0
    waiting.refresh_from_db()
    status, body = result_of(waiting)
    assert (waiting.status, status) == ("failed", 400)
    assert body["error"]["code"] == "model_not_found"  # type: ignore[index]
    finish(job)
    later.refresh_from_db()
    assert later.status == "queued"


def test_a_switched_off_model_s_job_fails_also_when_a_worker_comes_first(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    job = submit(user, key, model)
    BaseModel.objects.filter(pk=model.pk).update(is_enabled=False)
    assert claim(model) is None
    job.refresh_from_db()
    assert job.status == "failed"


# Cancels


def test_a_cancelled_job_that_waits_costs_nothing(user: User, key: ApiKey, model: BaseModel) -> None:
    job = services.request_cancel(job_id=submit(user, key, model).pk)
    assert (job.status, job.charged_tokens) == ("cancelled", 0)
    assert job.finished_at is not None
    assert not JobResult.objects.exists()
    assert claim(model) is None
    ended_at = job.finished_at
    assert services.cancel_job(job_id=job.pk).finished_at == ended_at


def test_a_cancel_charges_the_workers_own_count_or_the_last_one(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = claimed(model)
    running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=5)], renew=True)
    marked = services.request_cancel(job_id=job.pk)
    assert (marked.status, job_as_json(marked)["cancel_requested"]) == ("running", True)
    assert running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=5)], renew=False) == {job.pk: True}
    running.hand_back(job_id=job.pk, owner=OWNER, tokens=8)
    assert services.cancel_job(job_id=job.pk).charged_tokens == 8

    submit(user, key, model)
    job = claimed(model)
    running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=5)], renew=True)
    services.request_cancel(job_id=job.pk)
    ended = services.cancel_job(job_id=job.pk)
    assert (ended.status, ended.charged_tokens) == ("cancelled", 5)
    assert running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=6)], renew=True) == {}
    with pytest.raises(LeaseLostError):
        finish(job)
    assert_money(user, used=13)


@pytest.mark.parametrize("end", ["finish", "fail", "die", "lease"])
def test_however_a_run_ends_after_its_cancel_the_job_is_cancelled(
    user: User, key: ApiKey, model: BaseModel, end: str
) -> None:
    submit(user, key, model)
    job = claimed(model)
    services.request_cancel(job_id=job.pk)
    if end == "finish":
        finish(job)
    elif end == "fail":
        error = ApiError(ErrorCode.ENGINE_ERROR, "x")
        running.fail_running_job(job_id=job.pk, owner=OWNER, tokens=7, error=error)
    elif end == "die":
        running.fail_try(job_id=job.pk, owner=OWNER, tokens=7)
    else:
        running.look_after_jobs([running.Count(id=job.pk, owner=OWNER, tokens=7)], renew=True)
        let_the_lease_run_out(job)
        services.end_expired_leases()
    job.refresh_from_db()
    assert (job.status, job.charged_tokens) == ("cancelled", 7)
    assert not JobResult.objects.exists()
    assert_money(user, used=7)


def test_a_cancel_whose_api_process_died_is_ended_by_the_sweep(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = claimed(model)
    services.request_cancel(job_id=job.pk)
    assert services.end_forgotten_cancels() == 0
    CompletionJob.objects.update(cancel_requested_at=timezone.now() - timedelta(seconds=10))
    assert services.end_forgotten_cancels() == 1
    job.refresh_from_db()
    assert job.status == "cancelled"
    assert_money(user, used=0)


# Afterwards


def test_results_expire_and_their_jobs_stay(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    kept = finish(claimed(model))
    submit(user, key, model)
    over = finish(claimed(model))
    CompletionJob.objects.filter(pk=over.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    over.refresh_from_db()
    assert job_as_json(over)["result_expired"] is True
    assert services.erase_expired_results() == 1
    assert services.erase_expired_results() == 0
    assert [result.job_id for result in JobResult.objects.all()] == [kept.pk]
    over.refresh_from_db()
    assert (over.is_erased, over.status) == (True, "succeeded")
    assert job_as_json(over)["result_expired"] is True


def test_holds_of_jobs_that_are_gone_are_released(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    gone = claimed(model)
    submit(user, key, model)
    claimed(model)
    CompletionJob.objects.filter(pk=gone.pk).delete()
    assert services.end_orphaned_job_holds().released == 0
    Hold.objects.update(taken_at=timezone.now() - timedelta(minutes=5))
    assert services.end_orphaned_job_holds().released == 1
    assert services.end_orphaned_job_holds().released == 0
    assert_money(user, used=0, held=HOLD_TOKENS)


def test_the_database_refuses_states_that_cannot_be(user: User, key: ApiKey, model: BaseModel) -> None:
    job = submit(user, key, model)
    rows = CompletionJob.objects.filter(pk=job.pk)
    for changes in (
        {"status": "done"},
        {"status": "running"},
        {"status": "cancelled"},
        {"status": "succeeded", "finished_at": timezone.now(), "expires_at": timezone.now(), "charged_tokens": 0},
        {"charged_tokens": 1},
        {"is_erased": True},
        {"lease_owner": OWNER},
        {"cancel_requested_at": timezone.now()},
    ):
        with pytest.raises(IntegrityError):
            rows.update(**changes)
