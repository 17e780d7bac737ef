"""A User is deleted in the admin with all that is theirs, and never under work that runs."""

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.db.models.signals import pre_delete
from django.test import Client

from accounts.models import ApiKey, User
from budgets.models import Budget, Hold, LedgerEntry
from harvest.models import FilesToDelete, HarvestCorpus, HarvestJob
from harvest.services import cancel_harvest, submit_harvest
from inference.models import BaseModel
from jobs.models import CompletionJob, JobRequest
from jobs.services import cancel_job
from tests.harvest.conftest import plan_for
from tests.jobs.conftest import claimed, submit

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(db: None) -> Client:
    client = Client(headers={"host": "testserver"})
    client.force_login(User.objects.create_superuser("operator", "operator@example.org"))
    return client


def page_of(user: User) -> str:
    return f"/admin/accounts/user/{user.pk}/delete/"


def rows_of(user_id: int) -> dict[str, int]:
    """Count what is left of a User."""
    return {
        "users": User.objects.filter(pk=user_id).count(),
        "keys": ApiKey.objects.filter(user=user_id).count(),
        "jobs": CompletionJob.objects.filter(user=user_id).count(),
        "harvests": HarvestJob.objects.filter(user=user_id).count(),
        "holds": Hold.objects.filter(budget__user=user_id).count(),
    }


def test_a_deleted_user_s_work_money_and_files_go_too(
    operator: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    submit(user, key, model)
    ran = claimed(model)
    CompletionJob.objects.filter(pk=ran.pk).update(has_files=True, counted_tokens=5)
    waiting = submit(user, None, model)
    harvest = submit_harvest(user=user, api_key=key, plan=plan_for(model))
    refused = operator.get(page_of(user)).content.decode()
    assert "2 live Holds" in refused
    assert "Yes, I’m sure" not in refused
    operator.post(page_of(user), {"post": "yes"})
    assert rows_of(user.pk) == {"users": 1, "keys": 1, "jobs": 2, "harvests": 1, "holds": 2}

    cancel_job(job_id=ran.pk)
    cancel_harvest(job_id=harvest.pk)
    FilesToDelete.objects.all().delete()
    asked = operator.get(page_of(user)).content.decode()
    for counted in ("Completion Jobs: 2", "Harvest jobs: 1", "API keys: 1", "Ledger entries: 1", "Holds: 2"):
        assert counted in asked
    assert str(waiting.pk) not in asked
    answer = operator.post(page_of(user), {"post": "yes"}, follow=True)
    assert "was deleted successfully" in answer.text
    assert rows_of(user.pk) == {"users": 0, "keys": 0, "jobs": 0, "harvests": 0, "holds": 0}
    left: tuple[Any, ...] = (JobRequest, HarvestCorpus, Budget, LedgerEntry)
    assert [rows.objects.count() for rows in left] == [0] * len(left)
    assert set(FilesToDelete.objects.values_list("prefix", flat=True)) == {ran.storage_prefix, harvest.storage_prefix}
    assert LogEntry.objects.get().object_repr == user.username


def test_who_stands_in_the_audit_log_is_not_deleted(operator: Client, user: User) -> None:
    chosen = {"action": "suspend", "_selected_action": [user.pk], "confirmed": "yes"}
    operator.post("/admin/accounts/user/", chosen)
    myself = User.objects.get(username="operator")
    assert "audit log" in operator.get(page_of(myself)).content.decode()
    operator.post(page_of(myself), {"post": "yes"})
    assert User.objects.filter(pk=myself.pk).exists()


@pytest.fixture
def busy_user(user: User, model: BaseModel) -> Iterator[list[uuid.UUID]]:
    """Have the User submit a Job, on a connection of its own, once what goes with them has been read."""
    submitted: list[uuid.UUID] = []

    def submit_elsewhere() -> None:
        submitted.append(submit(user, None, model).pk)
        connection.close()

    def on_delete(sender: Any, instance: Any, **_: Any) -> None:
        thread = threading.Thread(target=submit_elsewhere)
        thread.start()
        thread.join(timeout=20)

    pre_delete.connect(on_delete, sender=User, weak=False, dispatch_uid="busy user")
    yield submitted
    pre_delete.disconnect(sender=User, dispatch_uid="busy user")


@pytest.mark.django_db(transaction=True)
def test_work_that_begins_meanwhile_keeps_its_user(operator: Client, user: User, busy_user: list[uuid.UUID]) -> None:
    answer = operator.post(page_of(user), {"post": "yes"}, follow=True)
    assert answer.status_code == 200
    assert "Nothing was deleted" in answer.text
    assert len(busy_user) == 1
    assert CompletionJob.objects.filter(pk=busy_user[0], user=user).exists()
    assert not LogEntry.objects.exists()
