"""A User is deleted in the admin with all that is theirs, and never under work that runs."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.db.models.signals import pre_delete
from django.test import Client

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError, ErrorCode
from budgets.models import Budget, Hold, KeyUse, LedgerEntry
from harvest.models import FilesToDelete, HarvestCorpus, HarvestJob
from harvest.services import cancel_harvest, submit_harvest
from inference.models import BaseModel
from jobs.models import CompletionJob, JobRequest
from jobs.services import cancel_job
from tests.harvest.conftest import plan_for
from tests.jobs.conftest import claim, claimed, submit

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
    of_the_model = operator.get(f"/admin/inference/basemodel/{model.pk}/delete/").content.decode()
    assert "Completion Jobs: 2; switch the model off instead" in of_the_model
    assert str(waiting.pk) not in of_the_model
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


class Meanwhile:
    """Does something on a connection of its own, from just before the User is deleted; keeps what came of it."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._thread = threading.Thread(target=self._run)
        self.came: object = None

    def begin(self, **_: Any) -> None:
        self._thread.start()
        # What would not wait is over by then.
        self._thread.join(timeout=0.3)

    def _run(self) -> None:
        try:
            self.came = self._act()
        except ApiError as error:
            self.came = error.code
        finally:
            connection.close()

    def end(self) -> object:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        return self.came


@pytest.fixture
def delete_meanwhile(operator: Client, user: User) -> Iterator[Callable[[Callable[[], object]], object]]:
    """Delete `user`, something going on at the same time, and return what came of that."""

    def delete(act: Callable[[], object]) -> object:
        meanwhile = Meanwhile(act)
        pre_delete.connect(meanwhile.begin, sender=User, weak=False, dispatch_uid="meanwhile")
        answer = operator.post(page_of(user), {"post": "yes"}, follow=True)
        assert "was deleted successfully" in answer.text
        assert not any(rows_of(user.pk).values())
        return meanwhile.end()

    yield delete
    pre_delete.disconnect(sender=User, dispatch_uid="meanwhile")


@pytest.mark.django_db(transaction=True)
def test_what_a_user_sends_while_they_are_deleted_is_refused(
    user: User, key: ApiKey, model: BaseModel, delete_meanwhile: Callable[[Callable[[], object]], object]
) -> None:
    came = delete_meanwhile(lambda: submit(user, key, model))
    assert came == ErrorCode.INVALID_API_KEY


@pytest.mark.django_db(transaction=True)
def test_no_worker_takes_a_job_whose_user_is_being_deleted(
    user: User, key: ApiKey, model: BaseModel, delete_meanwhile: Callable[[Callable[[], object]], object]
) -> None:
    submit(user, key, model)
    assert delete_meanwhile(lambda: claim(model)) is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["user", "apikey"])
def test_a_deletion_that_stands_in_another_s_way_says_so(
    operator: Client, user: User, key: ApiKey, model: BaseModel, kind: str
) -> None:
    submit(user, key, model)
    has_locked = threading.Event()
    # What a User's deletion, and a key's, come to first, and what they come to next.
    first, next_rows = (KeyUse, Budget) if kind == "user" else (CompletionJob, KeyUse)

    def lock_the_other_way_round() -> None:
        with transaction.atomic():
            list(first._default_manager.select_for_update())
            has_locked.set()
            give_up_at = time.monotonic() + 10
            while not rows_in("SELECT pid FROM pg_locks WHERE NOT granted") and time.monotonic() < give_up_at:
                time.sleep(0.01)
            list(next_rows._default_manager.select_for_update())
        connection.close()

    other = threading.Thread(target=lock_the_other_way_round)
    other.start()
    assert has_locked.wait(10)
    # Whoever waits the longest is looked at first, and is stopped.
    rows_in("SELECT set_config('deadlock_timeout', '100ms', false)")
    deleted = user if kind == "user" else key
    try:
        answer = operator.post(f"/admin/accounts/{kind}/{deleted.pk}/delete/", {"post": "yes"}, follow=True)
    finally:
        other.join(timeout=20)
        rows_in("SELECT set_config('deadlock_timeout', '1s', false)")
    assert "Nothing was deleted" in answer.text
    assert type(deleted)._default_manager.filter(pk=deleted.pk).exists()
    assert not LogEntry.objects.exists()


def rows_in(query: str) -> list[Any]:
    """Run `query` on this thread's connection."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())
