"""A worker killed inside one of its transactions leaves the Job, its Hold and the Budget as they were before."""

import os
import subprocess
import sys

import pytest
from django.db import connection

from accounts.models import ApiKey, User
from budgets.models import Hold
from budgets.selectors import imbalances
from inference.models import BaseModel
from jobs import running, services
from jobs.models import CompletionJob, JobRequest, JobResult
from jobs.services import Answer
from tests.jobs.conftest import HOLD_TOKENS, OWNER, assert_money, claim, claimed, let_the_lease_run_out, submit

pytestmark = pytest.mark.django_db(transaction=True)

HALFWAY = """
import sys, time, uuid
import django
django.setup()
from django.db import transaction
from jobs import running, services
from jobs.services import Answer
owner, what = uuid.UUID(int=1), sys.argv[1]
with transaction.atomic():
    if what == "claim":
        assert running.claim_job(base_model_id=int(sys.argv[2]), owner=owner)
    elif what == "finish":
        running.finish_job(job_id=uuid.UUID(sys.argv[2]), owner=owner, tokens=7, answer=Answer(200, b"{}", bytes=2))
    else:
        services.cancel_job(job_id=uuid.UUID(sys.argv[2]))
    print("halfway", flush=True)
    time.sleep(600)
"""


def kill_halfway(what: str, argument: object) -> None:
    """Do a step in a process of its own, and kill -9 that when all is written but not committed."""
    url = "postgres://{USER}:{PASSWORD}@{HOST}:{PORT}/{NAME}".format_map(connection.settings_dict)
    child = subprocess.Popen(
        [sys.executable, "-c", HALFWAY, what, str(argument)],
        env={**os.environ, "DATABASE_URL": url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "halfway\n"
    child.kill()
    child.communicate()


def test_a_worker_killed_while_it_claims_leaves_the_job_in_line(user: User, key: ApiKey, model: BaseModel) -> None:
    job = submit(user, key, model)
    kill_halfway("claim", model.pk)
    job.refresh_from_db()
    assert (job.status, job.claims, job.hold_id, job.started_at) == ("queued", 0, None, None)
    assert not Hold.objects.exists()
    assert claim(model) is not None
    assert_money(user, used=0, held=HOLD_TOKENS)


@pytest.mark.parametrize("what", ["finish", "cancel"])
def test_a_process_killed_while_it_ends_a_job_leaves_it_running_with_its_hold(
    user: User, key: ApiKey, model: BaseModel, what: str
) -> None:
    submit(user, key, model)
    job = claimed(model)
    kill_halfway(what, job.pk)
    job.refresh_from_db()
    assert (job.status, job.cancel_requested_at) == ("running", None)
    assert JobRequest.objects.count() == 1
    assert not JobResult.objects.exists()
    assert_money(user, used=0, held=HOLD_TOKENS)
    let_the_lease_run_out(job)
    services.end_expired_leases()
    again = claimed(model)
    running.finish_job(job_id=again.pk, owner=OWNER, tokens=7, answer=Answer(status=200, body=b"{}", bytes=2))
    assert CompletionJob.objects.get().status == "succeeded"
    assert_money(user, used=7)
    assert imbalances() == []
