"""What the scheduler runs, and what operators do in the admin."""

import json
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
from celery import Celery, current_app
from django.test import Client
from django.utils import timezone
from pytest_django import Settings
from redis import Redis

from accounts.models import ApiKey, User
from acsinfra.core.storage import get_storage
from harvest import services, tasks
from harvest.models import FilesToDelete, HarvestJob
from inference.models import BaseModel, Engine
from inference.services import register_engine
from tests.harvest.conftest import claim, let_the_lease_run_out, plan_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def job(user: User, key: ApiKey, model: BaseModel) -> HarvestJob:
    return services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def messages(broker: Redis) -> list[str]:
    """The names of the tasks that wait for the runners of `tiny`."""
    queued = broker.lrange(services.runner_queue("tiny"), 0, -1)
    return [json.loads(message)["headers"]["task"] for message in queued]


def test_a_submit_tells_the_runners_to_look(looks: Redis, job: HarvestJob) -> None:
    assert messages(looks) == [services.LOOK]


def test_a_sweep_puts_work_back_and_says_look(job: HarvestJob, model: BaseModel, looks: Redis) -> None:
    claim(model)
    let_the_lease_run_out(job.pk)
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    looks.delete(services.runner_queue("tiny"))
    tasks.sweep()
    tasks.sweep()
    job.refresh_from_db()
    assert (job.status, job.tries) == ("pending", 1)
    assert set(messages(looks)) == {services.LOOK}


def test_without_a_runner_no_message_is_left_for_one(job: HarvestJob, looks: Redis) -> None:
    looks.delete(services.runner_queue("tiny"))
    tasks.sweep()
    assert messages(looks) == []


def test_nothing_waits_and_nobody_is_told(job: HarvestJob, model: BaseModel, looks: Redis) -> None:
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    services.cancel_harvest(job_id=job.pk)
    looks.delete(services.runner_queue("tiny"))
    tasks.sweep()
    assert messages(looks) == []


def test_a_broker_that_is_away_stops_no_submit(
    user: User, key: ApiKey, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "app", Celery("away", broker="redis://127.0.0.1:1/0"))
    job = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert job.status == "pending"


def test_the_slow_sweep_fails_deletes_and_lives_with_a_storage_that_is_away(
    job: HarvestJob, settings: Settings, tmp_path: Path
) -> None:
    HarvestJob.objects.update(waiting_since=timezone.now() - timedelta(hours=25))
    get_storage().write(f"{job.storage_prefix}/shard_00000.safetensors", b"x")
    tasks.sweep_slowly()
    job.refresh_from_db()
    assert job.status == "failed"
    FilesToDelete.objects.update(not_before=timezone.now())
    working = settings.STORAGE_URL
    settings.STORAGE_URL = "s3://bucket?endpoint=http://127.0.0.1:1"
    tasks.sweep_slowly()
    assert FilesToDelete.objects.count() == 1
    settings.STORAGE_URL = working
    tasks.sweep_slowly()
    assert not FilesToDelete.objects.exists()
    assert get_storage().keys(job.storage_prefix) == []


def test_the_scheduler_runs_tasks_that_exist() -> None:
    from acsinfra.management.commands.scheduler import sweeps

    import_module("harvest.tasks")
    found = sweeps()
    assert {"harvest.sweep", "harvest.sweep_slowly", "inference.sweep_silent_engines"} <= found.keys()
    assert found.keys() <= current_app.tasks.keys()
    assert all(seconds >= 1 for seconds in found.values())


# The admin


@pytest.fixture
def operator(db: None) -> Client:
    staff = User.objects.create_superuser("root", "root@example.org", "a long enough password")
    client = Client()
    client.force_login(staff)
    return client


def act(operator: Client, action: str, job: HarvestJob) -> None:
    form = {"action": action, "_selected_action": [str(job.pk)], "confirmed": "yes"}
    answer = operator.post("/admin/harvest/harvestjob/", form, follow=True)
    assert answer.status_code == 200
    job.refresh_from_db()


def test_an_operator_reads_cancels_and_deletes_files(operator: Client, job: HarvestJob) -> None:
    assert str(job.pk) in operator.get("/admin/harvest/harvestjob/").content.decode()
    assert operator.get(f"/admin/harvest/harvestjob/{job.pk}/change/").status_code == 200
    assert operator.get("/admin/harvest/harvestjob/add/").status_code == 403
    act(operator, "delete_their_files", job)
    assert job.files_deleted_at is None
    act(operator, "cancel", job)
    assert (job.status, job.tokens) == ("cancelled", 0)
    act(operator, "delete_their_files", job)
    assert job.files_deleted_at is not None


def test_a_jobs_own_page_changes_nothing(operator: Client, job: HarvestJob) -> None:
    answer = operator.post(f"/admin/harvest/harvestjob/{job.pk}/change/", {"status": "done"})
    assert answer.status_code == 403
    job.refresh_from_db()
    assert job.status == "pending"
