"""Many at once on the same rows: one Job a key, one end a Job, one settlement, no place too many."""

import threading
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from django.db import connection

from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError
from acsinfra.core.idempotency import idempotent_request
from acsinfra.core.leases import LeaseLostError
from budgets.limits import set_monthly_tokens
from budgets.models import Hold, LedgerEntry
from budgets.selectors import imbalances
from inference.models import BaseModel
from jobs import running, services
from jobs.models import CompletionJob, JobResult
from jobs.services import Answer
from tests.budgets.test_races import at_once
from tests.harvest.conftest import make_key, make_model, make_user
from tests.jobs.conftest import HOLD_TOKENS, OWNER, assert_money, claim, claimed, let_the_lease_run_out, submit

pytestmark = pytest.mark.django_db(transaction=True)

ANSWER = Answer(status=200, body=b"{}", bytes=2)
AT_A_TIME = 25


def code_of(outcome: object) -> str:
    return outcome.code.value if isinstance(outcome, ApiError) else type(outcome).__name__


def test_one_key_from_32_connections_makes_one_job(user: User, key: ApiKey, model: BaseModel) -> None:
    once = idempotent_request(user_id=user.pk, key="k", route="r", body={})
    outcomes = at_once([lambda: submit(user, key, model, request=once)] * 32)
    assert {job.pk for job in outcomes if isinstance(job, CompletionJob)} == {CompletionJob.objects.get().pk}
    assert Counter(map(code_of, outcomes)) == {"CompletionJob": 32}


def test_submits_at_once_take_no_more_places_than_there_are(user: User, key: ApiKey, model: BaseModel) -> None:
    user.jobs_unfinished = 5
    outcomes = at_once([lambda: submit(user, key, model)] * 24)
    assert Counter(map(code_of, outcomes)) == {"CompletionJob": 5, "job_capacity": 19}
    assert CompletionJob.objects.count() == 5


def test_workers_of_several_models_run_eight_of_a_user_at_once(user: User, key: ApiKey, model: BaseModel) -> None:
    models = [model, make_model("second"), make_model("third")]
    for base_model in models:
        for _ in range(7):
            submit(user, key, base_model)
    steps = [partial(claim, base_model, uuid.uuid4()) for base_model in models for _ in range(8)]
    outcomes = at_once(steps)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert sum(outcome is not None for outcome in outcomes) == 8
    assert CompletionJob.objects.filter(status="running").count() == 8
    assert_money(user, used=0, held=8 * HOLD_TOKENS)
    job = CompletionJob.objects.filter(status="running").first()
    assert job is not None
    services.cancel_job(job_id=job.pk)
    assert sum(claim(base_model) is not None for base_model in models) == 1


def test_claims_at_once_hold_no_more_than_the_budget_has(user: User, key: ApiKey, model: BaseModel) -> None:
    for _ in range(6):
        submit(user, key, model)
    set_monthly_tokens(user=user, monthly_tokens=3 * HOLD_TOKENS)
    at_once([lambda: claim(model, uuid.uuid4())] * 6)
    states = Counter(CompletionJob.objects.values_list("status", flat=True))
    assert states == {"running": 3, "failed": 3}
    assert set(JobResult.objects.values_list("status", flat=True)) == {429}
    assert_money(user, used=0, held=3 * HOLD_TOKENS)


@pytest.mark.parametrize("races", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_a_cancel_against_a_finish_has_one_end_and_one_settlement(model: BaseModel, races: int) -> None:
    user = make_user("racer", jobs_unfinished=10_000, jobs_running=10_000)
    key = make_key(user)
    set_monthly_tokens(user=user, monthly_tokens=10**9)
    barrier = threading.Barrier(4)

    def finish(job: CompletionJob) -> None:
        running.finish_job(job_id=job.pk, owner=OWNER, tokens=7, answer=ANSWER)

    def cancel(job: CompletionJob) -> None:
        services.request_cancel(job_id=job.pk)
        services.cancel_job(job_id=job.pk)

    def let_go(job: CompletionJob) -> None:
        let_the_lease_run_out(job)
        services.end_expired_leases()

    def hand_back(job: CompletionJob) -> None:
        running.hand_back(job_id=job.pk, owner=OWNER, tokens=6)

    def run(jobs: list[CompletionJob], step: Callable[[CompletionJob], None]) -> list[str]:
        failures = []
        try:
            for number, job in enumerate(jobs):
                barrier.wait()
                try:
                    if not (step is let_go and number % 3) and not (step is hand_back and number % 2):
                        step(job)
                except LeaseLostError:
                    pass
                except Exception as error:  # noqa: BLE001 (it is the outcome)
                    failures.append(repr(error))
        finally:
            connection.close()
        return failures

    # A few at a time: their leases must not run out before their turn.
    for _ in range(races // AT_A_TIME):
        jobs: list[CompletionJob] = []
        for _ in range(AT_A_TIME):
            submit(user, key, model)
            jobs.append(claimed(model))
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(partial(run, jobs), [finish, cancel, let_go, hand_back]))
        assert outcomes == [[], [], [], []]
    ended = list(CompletionJob.objects.all())
    states = Counter(job.status for job in ended)
    assert set(states) <= {"succeeded", "cancelled"}
    assert sum(states.values()) == races
    assert min(states["succeeded"], states["cancelled"]) > 0, states
    assert not Hold.objects.filter(state="live").exists()
    charges = dict(LedgerEntry.objects.values_list("work_id", "tokens"))
    assert charges == {str(job.pk): job.charged_tokens for job in ended if job.charged_tokens}
    assert JobResult.objects.count() == states["succeeded"]
    assert imbalances() == []
