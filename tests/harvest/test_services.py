"""What happens to a Harvest job: every end, every limit, every race."""

import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone
from pytest_django import Settings

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError
from acsinfra.core.leases import LeaseLostError, renew_lease, require_lease
from acsinfra.core.storage import StoredObject, get_storage
from harvest import services
from harvest.models import FilesToDelete, HarvestCorpus, HarvestJob, HarvestShard
from harvest.runner.corpus import load_prompts
from inference.models import BaseModel
from tests.harvest.conftest import (
    LEASE,
    OWNER,
    claim,
    let_the_lease_run_out,
    make_key,
    make_model,
    make_user,
    plan_for,
)

RESULT: dict[str, Any] = {"manifest_key": "m", "stats_key": "s", "bytes_written": 5, "timings": {}}


@pytest.fixture
def job(user: User, key: ApiKey, model: BaseModel) -> HarvestJob:
    return services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def state(job: HarvestJob) -> tuple[str, int | None]:
    job.refresh_from_db()
    return job.status, job.tokens


def test_a_submitted_job_waits_with_its_prompts(job: HarvestJob) -> None:
    assert state(job) == ("pending", None)
    assert (job.started_at, job.completed_at, job.reserved_tokens) == (None, None, 12)
    assert load_prompts(job.corpus) == ["Hello", "there"]
    assert job.pk.version == job.run_id.version == 7


def test_a_claim_starts_the_run_once(job: HarvestJob, model: BaseModel) -> None:
    claimed = claim(model)
    assert claimed.pk == job.pk
    assert state(job) == ("running", None)
    assert claim(model) is None
    first_start = job.started_at
    assert first_start is not None
    services.hand_back(job_id=job.pk, owner=OWNER)
    assert state(job) == ("pending", None)
    assert job.started_at == first_start
    again = claim(model)
    assert (again.claims, again.tries, again.started_at) == (2, 0, first_start)


def test_a_finished_job_is_charged_what_was_read(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    assert state(job) == ("done", 7)
    assert job.completed_at is not None
    assert job.result == {**RESULT, "tokens": 7}
    assert job.lease_owner is None


def test_a_job_is_never_charged_more_than_it_reserved(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=13, result=RESULT)
    assert state(job) == ("done", 12)


def test_cancelling_what_waits_costs_nothing(job: HarvestJob) -> None:
    services.cancel_harvest(job_id=job.pk)
    assert state(job) == ("cancelled", 0)


def test_cancelling_what_runs_costs_what_it_reserved(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    services.cancel_harvest(job_id=job.pk)
    assert state(job) == ("cancelled", 12)


def test_cancelling_a_job_that_ran_and_waits_again_costs_what_it_reserved(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    services.hand_back(job_id=job.pk, owner=OWNER)
    services.cancel_harvest(job_id=job.pk)
    assert state(job) == ("cancelled", 12)


def test_an_ended_job_stays_as_it_is(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    ended = services.cancel_harvest(job_id=job.pk)
    assert (ended.status, ended.tokens) == ("done", 7)
    assert state(job) == ("done", 7)


@pytest.mark.parametrize("lose", ["cancel", "other"])
def test_whoever_lost_the_lease_writes_nothing(job: HarvestJob, model: BaseModel, lose: str) -> None:
    claim(model)
    if lose == "cancel":
        services.cancel_harvest(job_id=job.pk)
    else:
        let_the_lease_run_out(job.pk)
        assert services.end_expired_leases() == 1
        assert claim(model, uuid.UUID(int=2)).pk == job.pk
    before = HarvestJob.objects.filter(pk=job.pk).values().get()
    mine: dict[str, Any] = {"job_id": job.pk, "owner": OWNER}
    stored = StoredObject("k", 1, "00")
    for write in (
        lambda: services.finish_harvest(**mine, tokens=1, result=RESULT),
        lambda: services.fail_try(**mine, error="x"),
        lambda: services.hand_back(**mine),
        lambda: services.record_shard(**mine, index=0, stored=stored, sums_key="s"),
        lambda: services.record_progress(**mine, prompts=1, tokens=1, bytes_written=1),
        lambda: renew_lease(HarvestJob, pk=job.pk, owner=OWNER, lease=LEASE),
        lambda: require_lease(HarvestJob, pk=job.pk, owner=OWNER),
    ):
        with pytest.raises(LeaseLostError):
            write()
    assert HarvestJob.objects.filter(pk=job.pk).values().get() == before
    assert not HarvestShard.objects.exists()


def test_a_job_that_fails_three_times_ends_failed(job: HarvestJob, model: BaseModel) -> None:
    for _ in range(2):
        claim(model)
        services.fail_try(job_id=job.pk, owner=OWNER, error="The model could not be loaded.")
        assert state(job) == ("pending", None)
    claim(model)
    services.fail_try(job_id=job.pk, owner=OWNER, error="The model could not be loaded.")
    assert state(job) == ("failed", 0)
    assert job.error == "The model could not be loaded."


def test_a_job_whose_runner_goes_silent_three_times_ends_failed(job: HarvestJob, model: BaseModel) -> None:
    for tries in (1, 2, 3):
        assert claim(model).pk == job.pk
        assert services.end_expired_leases() == 0
        let_the_lease_run_out(job.pk)
        assert services.end_expired_leases() == 1
        assert services.end_expired_leases() == 0
        job.refresh_from_db()
        assert job.tries == tries
    assert state(job) == ("failed", 0)
    assert "runner stopped" in job.error


def test_a_storage_that_is_away_makes_a_job_wait_longer_each_time(job: HarvestJob, model: BaseModel) -> None:
    waits = []
    for _ in range(3):
        assert claim(model).pk == job.pk
        services.hand_back(job_id=job.pk, owner=OWNER, because_storage_is_away=True)
        job.refresh_from_db()
        assert job.retry_at is not None
        waits.append((job.retry_at - timezone.now()).total_seconds())
        assert claim(model) is None
        # PostgreSQL's now() is the start of the test's transaction.
        HarvestJob.objects.update(retry_at=timezone.now() - timedelta(hours=1))
    assert waits == pytest.approx([5, 10, 20], abs=2)
    assert (job.setbacks, job.tries) == (3, 0)
    HarvestJob.objects.update(setbacks=services.SETBACKS_AT_MOST - 1)
    claim(model)
    services.hand_back(job_id=job.pk, owner=OWNER, because_storage_is_away=True)
    assert state(job) == ("failed", 0)


def test_what_no_runner_takes_fails_with_no_tokens(job: HarvestJob, settings: Settings) -> None:
    assert services.fail_untaken() == 0
    HarvestJob.objects.update(waiting_since=timezone.now() - timedelta(hours=24, seconds=1))
    assert services.fail_untaken() == 1
    assert services.fail_untaken() == 0
    assert state(job) == ("failed", 0)
    assert job.error == "No runner took this job within 24 hours."


def test_a_running_job_is_not_failed_for_waiting(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    HarvestJob.objects.update(waiting_since=timezone.now() - timedelta(hours=25))
    assert services.fail_untaken() == 0


def test_a_job_that_a_runner_took_meanwhile_is_not_unavailable(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    assert services.fail_unavailable(job_id=job.pk, error="No runner.") is False
    services.hand_back(job_id=job.pk, owner=OWNER)
    assert services.fail_unavailable(job_id=job.pk, error="No runner.") is False
    assert state(job) == ("pending", None)


# Limits


def test_a_key_has_one_unfinished_job_by_default(model: BaseModel) -> None:
    user = make_user("eve")
    key, other = make_key(user), make_key(user, "other")
    first = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert (caught.value.status, caught.value.code) == (429, "harvest_concurrency_exceeded")
    assert caught.value.headers == {"Retry-After": "30"}
    services.submit_harvest(user=user, api_key=other, plan=plan_for(model))
    services.cancel_harvest(job_id=first.pk)
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def test_a_monthly_count_holds_where_an_operator_sets_one(model: BaseModel) -> None:
    user = make_user("eve", harvests_per_month=2)
    key = make_key(user)
    for _ in range(2):
        job = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
        services.cancel_harvest(job_id=job.pk)
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert (caught.value.status, caught.value.code) == (429, "harvest_quota_exceeded")
    HarvestJob.objects.update(created_at=timezone.now() - timedelta(days=40))
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def test_a_storage_quota_counts_what_is_kept_and_what_may_come(user: User, key: ApiKey, model: BaseModel) -> None:
    User.objects.update(storage_quota_bytes=25_000)
    done = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    claim(model)
    services.finish_harvest(job_id=done.pk, owner=OWNER, tokens=7, result={**RESULT, "bytes_written": 8_000})
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "corpus_too_large", "prompts")
    assert "10,000" in caught.value.message
    assert "7,000" in caught.value.message
    services.delete_files(job_id=done.pk)
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def at_once(number: int, act: Callable[[int], object]) -> list[object]:
    """Run `act` in threads that start together; return what each returned or raised."""
    results: list[object] = [None] * number
    barrier = threading.Barrier(number)

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = act(index)
        except Exception as error:  # noqa: BLE001
            results[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.django_db(transaction=True)
def test_of_submits_at_once_by_one_key_one_wins() -> None:
    user = make_user("eve")
    key, model = make_key(user), make_model()
    plan = plan_for(model)
    results = at_once(6, lambda _: services.submit_harvest(user=user, api_key=key, plan=plan))
    assert sum(isinstance(result, HarvestJob) for result in results) == 1
    refused = [result for result in results if isinstance(result, ApiError)]
    assert [error.code for error in refused] == ["harvest_concurrency_exceeded"] * 5
    assert HarvestJob.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_cancel_and_finish_at_once_one_wins() -> None:
    user = make_user("eve", harvests_unfinished=1_000)
    key, model = make_key(user), make_model()
    seen = set()
    for _ in range(20):
        job = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
        claim(model)

        def act(index: int, job_id: uuid.UUID = job.pk) -> object:
            if index:
                return services.cancel_harvest(job_id=job_id)
            return services.finish_harvest(job_id=job_id, owner=OWNER, tokens=7, result=RESULT)

        finished, cancelled = at_once(2, act)
        assert isinstance(cancelled, HarvestJob)
        end = state(job)
        assert end in {("done", 7), ("cancelled", 12)}
        assert isinstance(finished, HarvestJob if end[0] == "done" else LeaseLostError)
        assert (cancelled.status, cancelled.tokens) == end
        seen.add(end)
    assert seen


# Files


def test_deleting_files_takes_prompts_shards_and_storage(job: HarvestJob, model: BaseModel) -> None:
    with pytest.raises(ApiError):
        services.delete_files(job_id=job.pk)
    claimed = claim(model)
    stored = get_storage().write(f"{claimed.claim_prefix}/shard_00000.safetensors", b"values")
    sums = get_storage().write(f"{claimed.claim_prefix}/sums/sums_00000.safetensors", b"sums")
    services.record_shard(job_id=job.pk, owner=OWNER, index=0, stored=stored, sums_key=sums.key)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    assert services.delete_unneeded_files() == 1
    assert get_storage().keys(job.storage_prefix) == [stored.key]
    services.delete_files(job_id=job.pk)
    services.delete_files(job_id=job.pk)
    job.refresh_from_db()
    assert job.files_deleted_at is not None
    assert not HarvestCorpus.objects.exists()
    assert not HarvestShard.objects.exists()
    assert services.delete_unneeded_files() == 1
    assert services.delete_unneeded_files() == 0
    assert get_storage().keys(job.storage_prefix) == []


def test_shards_of_a_cancelled_job_go_once_its_runner_has_surely_stopped(job: HarvestJob, model: BaseModel) -> None:
    claimed = claim(model)
    get_storage().write(f"{claimed.claim_prefix}/shard_00000.safetensors", b"values")
    services.cancel_harvest(job_id=job.pk)
    assert services.delete_unneeded_files() == 0
    FilesToDelete.objects.update(not_before=timezone.now() - timedelta(seconds=1))
    assert services.delete_unneeded_files() == 1
    assert get_storage().keys(job.storage_prefix) == []


def test_files_go_with_their_user(job: HarvestJob, user: User) -> None:
    get_storage().write(f"{job.storage_prefix}/shard_00000.safetensors", b"values")
    services.cancel_harvest(job_id=job.pk)
    FilesToDelete.objects.all().delete()
    user.delete()
    assert not HarvestCorpus.objects.exists()
    assert services.delete_unneeded_files() == 1
    assert get_storage().keys(job.storage_prefix) == []


def test_files_are_kept_unless_an_operator_sets_a_time(job: HarvestJob, model: BaseModel, settings: Settings) -> None:
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    HarvestJob.objects.update(completed_at=timezone.now() - timedelta(days=400))
    assert services.delete_old_files() == 0
    settings.HARVEST_FILES_KEPT = timedelta(days=401)
    assert services.delete_old_files() == 0
    settings.HARVEST_FILES_KEPT = timedelta(days=399)
    assert services.delete_old_files() == 1
    assert services.delete_old_files() == 0


def test_each_claim_writes_to_a_place_of_its_own(job: HarvestJob, model: BaseModel) -> None:
    first = claim(model).claim_prefix
    services.hand_back(job_id=job.pk, owner=OWNER)
    second = claim(model).claim_prefix
    assert first == f"harvest/{job.run_id}"
    assert second == f"harvest/{job.run_id}/claim_2"


# What the database itself refuses


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "lost"},
        {"status": "running"},
        {"status": "done", "tokens": 1},
        {"status": "failed", "tokens": 0, "completed_at": timezone.now()},
        {"tokens": 1},
        {"completed_at": timezone.now()},
        {"error": "x"},
        {"lease_owner": OWNER},
        {"status": "cancelled", "tokens": 13, "completed_at": timezone.now()},
        {"files_deleted_at": timezone.now()},
        {"n_prompts": 0},
    ],
)
def test_an_illegal_state_cannot_be_written(job: HarvestJob, changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        HarvestJob.objects.filter(pk=job.pk).update(**changes)
