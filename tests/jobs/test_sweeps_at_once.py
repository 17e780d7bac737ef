"""Several schedulers do no harm: each sweep of every app, run by four at once, does its work once."""

import threading
import uuid
from collections import Counter
from datetime import timedelta

import pytest
from celery import current_app
from django.db import connections
from django.utils import timezone

from accounts.models import User
from acsinfra.core.idempotency import bind_work, idempotent_request
from acsinfra.core.storage import get_storage
from acsinfra.management.commands.scheduler import sweeps
from acsinfra.models import IdempotencyKey, RequestCount
from budgets.models import Hold, LedgerEntry, MonthlyLimit, WorkKind
from budgets.selectors import budget_summary, imbalances
from budgets.services import WorkRef, take_hold
from harvest.models import FilesToDelete, HarvestJob
from harvest.services import submit_harvest
from inference.models import BaseModel, Engine
from inference.services import register_engine
from jobs import running
from jobs.models import CompletionJob, JobResult
from jobs.services import Answer
from tests.harvest.conftest import claim as claim_harvest
from tests.harvest.conftest import make_key, make_model, make_user, plan_for
from tests.jobs.conftest import HOLD_TOKENS, OWNER, claimed, submit

pytestmark = pytest.mark.django_db(transaction=True)

AT_ONCE = 4
OF_EACH = 2
LONG_AGO = timezone.now() - timedelta(days=90)


def run_at_once(name: str) -> list[BaseException]:
    """Run the sweep `name` in several threads that begin together; return what they raised."""
    together = threading.Barrier(AT_ONCE)
    raised: list[BaseException] = []

    def run() -> None:
        together.wait(30)
        try:
            current_app.tasks[name]()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            raised.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def make_jobs(user: User, model: BaseModel, switched_off: BaseModel) -> dict[str, list[uuid.UUID]]:
    """Make some Completion Jobs of every kind that a sweep looks for."""
    key = make_key(user)

    def some() -> list[CompletionJob]:
        for _ in range(OF_EACH):
            submit(user, key, model)
        jobs = [claimed(model) for _ in range(OF_EACH)]
        assert {job.user_id for job in jobs} == {user.pk}
        return jobs

    made: dict[str, list[uuid.UUID]] = {}
    for kind in ("lapsed", "lapsed for the third time", "cancelled", "expired", "orphaned"):
        made[kind] = [job.pk for job in some()]
    for pk in made["expired"]:
        running.note_files(job_id=pk, owner=OWNER)
        stored = get_storage().write(f"jobs/{pk}/result_1.json", b"{}")
        answer = Answer(status=200, key=stored.key, bytes=stored.bytes)
        running.finish_job(job_id=pk, owner=OWNER, tokens=5, answer=answer)
    rows = CompletionJob.objects
    rows.filter(pk__in=made["expired"]).update(expires_at=LONG_AGO)
    lapsed = rows.filter(pk__in=made["lapsed"] + made["lapsed for the third time"])
    lapsed.update(lease_expires_at=LONG_AGO, counted_tokens=7)
    rows.filter(pk__in=made["lapsed for the third time"]).update(tries=2)
    rows.filter(pk__in=made["cancelled"]).update(cancel_requested_at=LONG_AGO, counted_tokens=6)
    rows.filter(pk__in=made["orphaned"]).delete()
    Hold.objects.filter(work_id__in=map(str, made["orphaned"])).update(taken_at=LONG_AGO)
    for _ in range(OF_EACH):
        submit(user, key, switched_off)
    return made


def make_harvests(user: User, model: BaseModel) -> dict[str, list[uuid.UUID]]:
    """Make some Harvest jobs of every kind that a sweep looks for."""
    key = make_key(user)
    made: dict[str, list[uuid.UUID]] = {}
    for kind in ("lapsed", "lapsed for the third time", "untaken", "without a runner"):
        made[kind] = [submit_harvest(user=user, api_key=key, plan=plan_for(model)).pk for _ in range(OF_EACH)]
        if kind.startswith("lapsed"):
            assert {claim_harvest(model).pk for _ in range(OF_EACH)} == set(made[kind])
    rows = HarvestJob.objects.filter(user=user)
    rows.update(runner_due_at=None)
    rows.filter(pk__in=made["lapsed"] + made["lapsed for the third time"]).update(lease_expires_at=LONG_AGO)
    rows.filter(pk__in=made["lapsed for the third time"]).update(tries=2)
    rows.filter(pk__in=made["untaken"]).update(waiting_since=LONG_AGO)
    rows.filter(pk__in=made["without a runner"]).update(runner_due_at=LONG_AGO)
    return made


def make_the_rest(user: User, model: BaseModel) -> None:
    """Make what the other sweeps look for: Completions of a dead API process, old keys and counts, a silent engine."""
    for number in range(OF_EACH):
        work = WorkRef(WorkKind.COMPLETION, f"req_{user.pk}_{number}", holder="dead")
        take_hold(user=user, api_key=None, tokens=9, work=work, expires_at=LONG_AGO)
        once = idempotent_request(user_id=user.pk, key=f"k{number}", route="r", body={})
        bind_work(once, uuid.uuid4())
    IdempotencyKey.objects.update(created_at=LONG_AGO)
    for seconds in range(OF_EACH):
        hour = LONG_AGO - timedelta(hours=seconds)
        RequestCount.objects.create(
            hour=hour, route="/v1/models", method="GET", status=200, bucket=user.pk % 10, requests=2, seconds=1.0
        )
    register_engine(model=model, kind=Engine.Kind.INFERENCE)
    Engine.objects.update(heartbeat_at=LONG_AGO)
    MonthlyLimit.objects.create(user=user, monthly_tokens=4_000_000)


def test_every_sweep_run_by_four_at_once_does_its_work_once() -> None:
    model, switched_off = make_model(), make_model("off")
    users = [make_user(f"user{n}", harvests_unfinished=100, jobs_running=100) for n in range(2)]
    for user in users:
        make_jobs(user, model, switched_off)
        make_harvests(user, model)
        make_the_rest(user, model)
    BaseModel.objects.filter(pk=switched_off.pk).update(is_enabled=False)
    FilesToDelete.objects.update(not_before=LONG_AGO)

    raised = {name: errors for name in sorted(sweeps()) if (errors := run_at_once(name))}
    assert raised == {}

    n = OF_EACH * len(users)
    jobs = Counter(CompletionJob.objects.values_list("status", "tries", "charged_tokens", "is_erased"))
    assert jobs == {
        ("queued", 1, None, False): n,
        ("failed", 3, 7, False): n,
        ("cancelled", 0, 6, False): n,
        ("succeeded", 0, 5, True): n,
        ("failed", 0, 0, False): n,
    }
    assert JobResult.objects.filter(status=200).count() == 0
    harvests = Counter(HarvestJob.objects.values_list("status", "tries", "tokens"))
    assert harvests == {("pending", 1, None): n, ("failed", 3, 0): n, ("failed", 0, 0): 2 * n}
    assert not IdempotencyKey.objects.exists()
    assert not Engine.objects.exists()
    assert sum(RequestCount.objects.values_list("requests", flat=True)) == 2 * n
    assert len(set(RequestCount.objects.values_list("hour", flat=True))) == 1
    assert imbalances() == []
    assert LedgerEntry.objects.count() == 3 * n
    for user in users:
        budget = budget_summary(user)
        # The Jobs and Harvest jobs that wait again keep their Holds.
        assert (budget.limit, budget.used) == (4_000_000, OF_EACH * (7 + 6 + 5))
        assert budget.held == OF_EACH * (HOLD_TOKENS + plan_for(model).reserved_tokens)
