"""What the scheduler runs, what operators do in the admin, and what is left of a Job's files."""

import json
from datetime import timedelta
from importlib import import_module

import pytest
from celery import current_app
from django.test import Client
from django.utils import timezone
from pytest_django import Settings
from redis import Redis

from accounts.models import ApiKey, User
from acsinfra.core.storage import get_storage
from harvest.models import FilesToDelete
from harvest.services import delete_unneeded_files
from inference.models import BaseModel, Engine
from inference.services import mark_live, register_engine
from jobs import running, services, tasks
from jobs.models import CompletionJob, JobResult
from jobs.services import Answer
from tests.jobs.conftest import OWNER, assert_money, claimed, let_the_lease_run_out, submit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def looks(settings: Settings) -> Redis:
    """Return the broker, without any message for workers."""
    broker: Redis = Redis.from_url(settings.BROKER_URL)
    broker.delete(services.jobs_queue("tiny"))
    return broker


def messages(broker: Redis) -> list[str]:
    """The names of the tasks that wait for the workers of `tiny`."""
    queued = broker.lrange(services.jobs_queue("tiny"), 0, -1)
    return [json.loads(message)["headers"]["task"] for message in queued]


def finish_with_file(job: CompletionJob) -> CompletionJob:
    running.note_files(job_id=job.pk, owner=OWNER)
    stored = get_storage().write(f"{job.storage_prefix}/result_{job.claims}.json", b"{}")
    answer = Answer(status=200, key=stored.key, bytes=stored.bytes)
    return running.finish_job(job_id=job.pk, owner=OWNER, tokens=5, answer=answer)


def test_the_scheduler_runs_the_sweeps_of_jobs() -> None:
    command = import_module("acsinfra.management.commands.scheduler")
    assert set(tasks.SWEEPS) <= set(command.sweeps())
    assert set(tasks.SWEEPS) <= set(current_app.tasks)


def test_a_sweep_puts_jobs_back_and_says_look_where_an_engine_serves(
    user: User, key: ApiKey, model: BaseModel, looks: Redis
) -> None:
    submit(user, key, model)
    job = claimed(model)
    let_the_lease_run_out(job)
    looks.delete(services.jobs_queue("tiny"))
    tasks.sweep()
    job.refresh_from_db()
    assert (job.status, job.tries) == ("queued", 1)
    looks.delete(services.jobs_queue("tiny"))
    tasks.sweep()
    assert messages(looks) == []
    mark_live(engine=register_engine(model=model, kind=Engine.Kind.INFERENCE))
    tasks.sweep()
    assert messages(looks) == [services.LOOK]


def test_expired_results_go_with_their_files(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = finish_with_file(claimed(model))
    tasks.sweep_slowly()
    assert JobResult.objects.count() == 1
    CompletionJob.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    tasks.sweep_slowly()
    tasks.sweep_slowly()
    delete_unneeded_files()
    assert get_storage().keys(job.storage_prefix) == []
    assert not JobResult.objects.exists()
    assert CompletionJob.objects.get().status == "succeeded"


def test_files_of_a_run_that_brought_no_result_go(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = claimed(model)
    running.note_files(job_id=job.pk, owner=OWNER)
    get_storage().write(f"{job.storage_prefix}/result_1.json", b"{}")
    services.cancel_job(job_id=job.pk)
    FilesToDelete.objects.update(not_before=timezone.now())
    delete_unneeded_files()
    assert get_storage().keys(job.storage_prefix) == []


def test_the_files_and_holds_of_a_deleted_users_jobs_go(user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    job = finish_with_file(claimed(model))
    submit(user, key, model)
    claimed(model)
    user.delete()
    assert not CompletionJob.objects.exists()
    tasks.sweep_slowly()
    delete_unneeded_files()
    assert get_storage().keys(job.storage_prefix) == []


def test_operators_read_and_cancel_jobs_in_the_admin(
    user: User, key: ApiKey, model: BaseModel, admin_client: Client
) -> None:
    submit(user, key, model)
    running_job = claimed(model)
    waiting = submit(user, key, model)
    listed = admin_client.get("/admin/jobs/completionjob/")
    assert str(waiting.pk) in listed.text
    page = admin_client.get(f"/admin/jobs/completionjob/{waiting.pk}/change/")
    assert page.status_code == 200
    assert waiting.request_id in page.text
    assert 'name="_save"' not in page.text
    chosen = {"action": "cancel", "_selected_action": [str(running_job.pk), str(waiting.pk)], "confirmed": "yes"}
    answer = admin_client.post("/admin/jobs/completionjob/", chosen, follow=True)
    assert "done for 2." in answer.text
    assert set(CompletionJob.objects.values_list("status", flat=True)) == {"cancelled"}
    assert_money(user, used=0)
    assert "delete_selected" not in listed.text
