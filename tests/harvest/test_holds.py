"""A Harvest job's reserved tokens are held from submit to end, and charged once or let go, whatever dies."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone
from redis import Redis

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError
from budgets.limits import set_key_cap, set_monthly_tokens
from budgets.models import Hold, LedgerEntry, SpendLimit
from budgets.selectors import budget_summary, imbalances
from budgets.services import SweepCount, settle_hold
from budgets.spend import forget_spending
from harvest import services, tasks
from harvest.models import HarvestCorpus, HarvestJob
from harvest.runner.lives import PromptsInFlight, RunnerLife
from harvest.runner.worker import Runner
from inference.models import BaseModel, Engine
from inference.services import register_engine
from tests.harvest.child import RESULT
from tests.harvest.conftest import OWNER, claim, let_the_lease_run_out, plan_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(user: User, key: ApiKey, model: BaseModel) -> HarvestJob:
    return services.submit_harvest(user=user, api_key=key, plan=plan_for(model))


def money(user: User) -> tuple[int, int]:
    """Return (used, held), which add up."""
    assert imbalances() == []
    summary = budget_summary(user)
    assert summary.used == sum(LedgerEntry.objects.values_list("tokens", flat=True))
    return summary.used, summary.held


def test_a_job_holds_what_it_reserves_until_it_ends(job: HarvestJob, user: User, model: BaseModel) -> None:
    hold = job.hold
    assert hold is not None
    assert (hold.tokens, hold.work_kind, hold.work_id, hold.state) == (12, "harvest", str(job.pk), "live")
    assert money(user) == (0, 12)
    claim(model)
    assert money(user) == (0, 12)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    assert money(user) == (7, 0)
    assert LedgerEntry.objects.get().work_id == str(job.pk)


def test_what_is_cancelled_before_its_run_costs_nothing(job: HarvestJob, user: User) -> None:
    services.cancel_harvest(job_id=job.pk)
    services.cancel_harvest(job_id=job.pk)
    assert money(user) == (0, 0)
    assert Hold.objects.get().state == "released"


def test_what_is_cancelled_after_its_run_began_costs_all_it_reserved(
    job: HarvestJob, user: User, model: BaseModel
) -> None:
    claim(model)
    services.cancel_harvest(job_id=job.pk)
    services.cancel_harvest(job_id=job.pk)
    assert money(user) == (12, 0)


def test_what_fails_costs_nothing(job: HarvestJob, user: User, model: BaseModel) -> None:
    for _ in range(3):
        claim(model)
        services.fail_try(job_id=job.pk, owner=OWNER, error="The model could not be loaded.")
    job.refresh_from_db()
    assert (job.status, money(user)) == ("failed", (0, 0))


def test_a_run_that_begins_again_keeps_its_hold(job: HarvestJob, user: User, model: BaseModel) -> None:
    hold_id = job.hold_id
    claim(model)
    let_the_lease_run_out(job.pk)
    services.end_expired_leases()
    claim(model)
    services.hand_back(job_id=job.pk, owner=OWNER)
    assert money(user) == (0, 12)
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=100, result=RESULT)
    job.refresh_from_db()
    assert (job.hold_id, job.tokens, money(user)) == (hold_id, 12, (12, 0))
    assert Hold.objects.count() == 1


def test_a_job_from_the_app_holds_without_a_key(user: User, model: BaseModel) -> None:
    job = services.submit_harvest(user=user, api_key=None, plan=plan_for(model))
    assert job.hold is not None
    assert (job.hold.key_use_id, money(user)) == (None, (0, 12))


@pytest.mark.parametrize("limit", ["budget", "cap"])
def test_a_job_that_does_not_fit_is_refused_and_leaves_nothing(
    user: User, key: ApiKey, model: BaseModel, limit: str
) -> None:
    if limit == "budget":
        set_monthly_tokens(user=user, monthly_tokens=23)
    else:
        set_key_cap(api_key=key, token_cap=23)
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert (caught.value.status, caught.value.code) == (429, "budget_exceeded")
    assert caught.value.headers == {"x-should-retry": "false"}
    assert "11" in caught.value.message
    assert (HarvestJob.objects.count(), HarvestCorpus.objects.count(), money(user)) == (1, 1, (0, 12))


def test_the_place_is_looked_at_before_the_budget(user: User, key: ApiKey, model: BaseModel) -> None:
    User.objects.update(harvests_unfinished=1)
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    set_monthly_tokens(user=user, monthly_tokens=0)
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert caught.value.code == "harvest_concurrency_exceeded"


def test_a_key_that_is_gone_is_no_key(user: User, key: ApiKey, model: BaseModel) -> None:
    ApiKey.objects.all().delete()
    with pytest.raises(ApiError) as caught:
        services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert caught.value.status == 401


def test_a_job_outlives_its_key_and_is_charged(job: HarvestJob, user: User, model: BaseModel) -> None:
    ApiKey.objects.all().delete()
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    assert money(user) == (7, 0)


def test_a_user_is_deleted_with_unfinished_work(job: HarvestJob, user: User) -> None:
    user.delete()
    assert not HarvestJob.objects.exists()
    assert not Hold.objects.exists()


def test_a_hold_that_ended_before_its_job_is_not_charged_again(job: HarvestJob, user: User, model: BaseModel) -> None:
    assert job.hold is not None
    settle_hold(hold=job.hold, tokens=5)
    claim(model)
    services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT)
    assert money(user) == (5, 0)


# Sweeps


def test_the_hold_of_a_job_that_is_no_more_is_released(job: HarvestJob, user: User, model: BaseModel) -> None:
    assert services.end_orphaned_harvest_holds() == SweepCount()
    claim(model)
    assert services.end_orphaned_harvest_holds() == SweepCount()
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM harvest_harvestcorpus")
        cursor.execute("DELETE FROM harvest_harvestjob")
    assert services.end_orphaned_harvest_holds() == SweepCount(released=1)
    assert services.end_orphaned_harvest_holds() == SweepCount()
    assert money(user) == (0, 0)


def runner_was_due(job: HarvestJob) -> None:
    HarvestJob.objects.filter(pk=job.pk).update(runner_due_at=timezone.now() - timedelta(seconds=1))


def test_a_job_whose_api_process_died_within_the_grace_fails_soon(job: HarvestJob, user: User) -> None:
    assert job.runner_due_at is not None
    assert services.end_graces() == 0
    runner_was_due(job)
    assert services.end_graces() == 1
    assert services.end_graces() == 0
    job.refresh_from_db()
    assert (job.status, job.tokens, job.error) == ("failed", 0, "No runner is there for tiny.")
    assert money(user) == (0, 0)


def test_a_job_whose_runner_came_is_taken_in_by_the_sweep(job: HarvestJob, model: BaseModel) -> None:
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    runner_was_due(job)
    assert services.end_graces() == 1
    job.refresh_from_db()
    assert (job.status, job.runner_due_at) == ("pending", None)
    Engine.objects.update(heartbeat_at=Now() - timedelta(hours=1))
    assert services.end_graces() == 0


def test_a_job_that_has_run_is_not_failed_for_want_of_a_runner(job: HarvestJob, model: BaseModel) -> None:
    claim(model)
    runner_was_due(job)
    assert services.end_graces() == 0
    services.hand_back(job_id=job.pk, owner=OWNER)
    assert services.end_graces() == 1
    job.refresh_from_db()
    assert (job.status, job.runner_due_at) == ("pending", None)


def test_a_job_is_taken_in_at_once_where_a_runner_is_there(user: User, key: ApiKey, model: BaseModel) -> None:
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    assert services.submit_harvest(user=user, api_key=key, plan=plan_for(model)).runner_due_at is None


@pytest.mark.django_db(transaction=True)
def test_sweeps_and_a_cancel_at_once_end_each_hold_once(user: User, key: ApiKey, model: BaseModel) -> None:
    jobs = [services.submit_harvest(user=user, api_key=key, plan=plan_for(model)) for _ in range(12)]
    for job in jobs:
        runner_was_due(job)
    claim(model)
    let_the_lease_run_out(jobs[0].pk)
    HarvestJob.objects.filter(pk=jobs[0].pk).update(tries=2)
    barrier = threading.Barrier(4)
    faults: list[Exception] = []

    def act(number: int) -> None:
        barrier.wait()
        try:
            if number < 2:
                tasks.sweep()
                tasks.sweep_slowly()
                return
            for job in jobs[number::2]:
                services.cancel_harvest(job_id=job.pk)
        except Exception as error:  # noqa: BLE001
            faults.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert not Hold.objects.filter(state="live").exists()
    assert HarvestJob.objects.filter(completed_at__isnull=False).count() == 12
    used, held = money(user)
    assert (used, held) == (sum(tokens or 0 for tokens in HarvestJob.objects.values_list("tokens", flat=True)), 0)


# Processes killed halfway


def kill_inside(act: str, subject: object) -> None:
    """Start a process that does `act`, and kill it inside the transaction."""
    url = "postgres://{USER}:{PASSWORD}@{HOST}:{PORT}/{NAME}".format_map(connection.settings_dict)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.harvest.child", act, str(subject)],
        env={**os.environ, "DATABASE_URL": url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "done\n"
    finally:
        child.kill()
        child.communicate()


@pytest.mark.django_db(transaction=True)
def test_a_process_killed_inside_its_submit_leaves_neither_job_nor_hold(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    kill_inside("submit", key.pk)
    assert (HarvestJob.objects.count(), Hold.objects.count()) == (0, 0)
    assert money(user) == (0, 0)
    services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    assert money(user) == (0, 12)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("act", "is_claimed", "charged"),
    [("finish", True, 7), ("cancel", True, 12), ("cancel", False, 0), ("fail", False, 0)],
)
def test_a_process_killed_inside_the_end_leaves_the_job_unended_and_its_hold_live(
    user: User, key: ApiKey, model: BaseModel, act: str, is_claimed: bool, charged: int
) -> None:
    job = services.submit_harvest(user=user, api_key=key, plan=plan_for(model))
    if is_claimed:
        claim(model)
    kill_inside(act, job.pk)
    job.refresh_from_db()
    assert (job.status, job.tokens) == ("running" if is_claimed else "pending", None)
    assert money(user) == (0, 12)
    again: dict[str, Any] = {
        "finish": lambda: services.finish_harvest(job_id=job.pk, owner=OWNER, tokens=7, result=RESULT),
        "cancel": lambda: services.cancel_harvest(job_id=job.pk),
        "fail": lambda: services.fail_unavailable(job_id=job.pk, error="No runner."),
    }
    again[act]()
    job.refresh_from_db()
    assert (job.tokens, money(user)) == (charged, (charged, 0))


def test_what_no_row_has_cannot_be_changed(db: None) -> None:
    for act in (services.cancel_harvest, services.delete_files):
        with pytest.raises(ApiError) as caught:
            act(job_id=uuid.UUID(int=9))
        assert caught.value.status == 404


# The Spend limit


@pytest.fixture
def paused() -> Iterator[SpendLimit]:
    limit = SpendLimit.objects.create(is_paused=True)
    forget_spending()
    yield limit
    forget_spending()


def end_the_pause(limit: SpendLimit) -> None:
    limit.is_paused = False
    limit.save()
    forget_spending()


@pytest.mark.django_db(transaction=True)
def test_what_waits_goes_on_waiting_under_the_spend_limit(
    job: HarvestJob, user: User, model: BaseModel, paused: SpendLimit, looks: Redis
) -> None:
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    HarvestJob.objects.update(waiting_since=timezone.now() - timedelta(hours=25))
    looks.delete(services.runner_queue("tiny"))
    runner = Runner(
        model=model,
        checkpoint="/nowhere",
        is_stopping=lambda: False,
        end_process=lambda: pytest.fail("the engine died"),
        life=RunnerLife(PromptsInFlight(1)),
    )
    runner.run_waiting_jobs()
    tasks.sweep()
    tasks.sweep_slowly()
    job.refresh_from_db()
    assert (job.status, job.claims, money(user)) == ("pending", 0, (0, 12))
    assert looks.llen(services.runner_queue("tiny")) == 0
    end_the_pause(paused)
    tasks.sweep_slowly()
    tasks.sweep()
    job.refresh_from_db()
    assert job.status == "pending"
    assert looks.llen(services.runner_queue("tiny")) == 1
    looks.delete(services.runner_queue("tiny"))
