"""The next Job of a model is the oldest of the User who has the fewest running there, eight at once for a User."""

import json
import string
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accounts.models import User
from acsinfra.core import leases
from acsinfra.core.leases import RunningLimit
from inference.models import BaseModel
from jobs.models import CompletionJob
from tests.harvest.conftest import make_key, make_model, make_user
from tests.jobs.conftest import OWNER, claim, submit

LIMIT = RunningLimit(column="jobs_running", default=8)


def submit_for(names: str, model: BaseModel, **limits: int | None) -> dict[uuid.UUID, str]:
    """Submit a Job for each letter's User, in this order; return whose each Job is."""
    users = {name: make_user(name, jobs_unfinished=10_000, **limits) for name in sorted(set(names))}
    keys = {name: make_key(user) for name, user in users.items()}
    return {submit(users[name], keys[name], model).pk: name for name in names}


def expected_order(names: str, at_once: int) -> str:
    """Whose Jobs run in which order when none ends, by the words of the contract."""
    waiting, running, order = list(names), dict.fromkeys(names, 0), ""
    while ready := [name for name in waiting if running[name] < at_once]:
        name = min(ready, key=lambda name: (running[name], waiting.index(name)))
        waiting.remove(name)
        running[name] += 1
        order += name
    return order


@pytest.mark.django_db
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.text(alphabet="abc", min_size=1, max_size=10), at_once=st.integers(1, 4), front=st.sampled_from([0, 2, 50])
)
def test_users_take_turns_up_to_their_limit(names: str, at_once: int, front: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # However much of the line's front is looked at first, the order is the same.
        patch.setattr(CompletionJob, "FRONT", front)
        CompletionJob.objects.all().delete()
        User.objects.all().delete()
        model = BaseModel.objects.first() or make_model()
        whose = submit_for(names, model, jobs_running=at_once)
        taken = []
        while (job := claim(model)) is not None:
            taken.append(job.id)
        assert "".join(whose[job_id] for job_id in taken) == expected_order(names, at_once)
        for name in names:
            own = [job_id for job_id in taken if whose[job_id] == name]
            assert own == [job_id for job_id in whose if whose[job_id] == name][: len(own)]


@pytest.mark.django_db
@pytest.mark.parametrize(("n_users", "running_each"), [(1, 0), (20, 0), (20, 3)])
def test_a_claim_reads_few_rows_however_many_jobs_wait_or_have_ended(n_users: int, running_each: int) -> None:
    model = make_model()
    letters = string.ascii_lowercase[:n_users]
    submit_for(letters, model)
    columns = [field.attname for field in CompletionJob._meta.concrete_fields]
    fresh = ["gen_random_uuid()" if name == "id" else name for name in columns]
    end = {"status": "'failed'", "finished_at": "now()", "expires_at": "now()", "charged_tokens": "0"}
    ended = [
        {**end, "created_at": "created_at - interval '1 day'"}.get(name, value)
        for name, value in zip(columns, fresh, strict=True)
    ]
    with connection.cursor() as cursor:
        for copied in (ended, fresh):
            cursor.execute(
                f"INSERT INTO jobs_completionjob ({', '.join(columns)}) SELECT {', '.join(copied)} FROM "
                f"(SELECT * FROM jobs_completionjob WHERE status = 'queued' LIMIT %s) j "
                "CROSS JOIN generate_series(1, %s)",
                [len(letters), 20_000 // len(letters)],
            )
        cursor.execute("ANALYZE jobs_completionjob")
        # The planner knows nothing of these: its figures are always of a while ago.
        for _ in range(n_users * running_each):
            taken = leases.claim_next(
                CompletionJob, base_model_id=model.pk, owner=OWNER, lease=timedelta(minutes=1), limit=LIMIT
            )
            assert taken is not None
        # By the plan for whatever values, which PostgreSQL makes once for a connection.
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        types = {"model": "bigint", "owner": "uuid", "lease": "interval", "at_once": "int", "passed_over": "bigint[]"}
        pages, whole = 0, ""
        for number, query in enumerate(leases.claim_queries(CompletionJob, LIMIT)):
            numbered = query % {name: f"${at}" for at, name in enumerate(types, 1)}
            cursor.execute(f"PREPARE claim_{number} ({', '.join(types.values())}) AS {numbered}")
            values: list[Any] = [model.pk, OWNER, "30 s", 8, []]
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE claim_{number}(%s, %s, %s, %s, %s)"
            cursor.execute(explain, values)
            (plan,) = cursor.fetchone()[0]
            cursor.execute(f"DEALLOCATE claim_{number}")
            assert "Seq Scan on jobs_completionjob" not in json.dumps(plan)
            pages = max(pages, plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
            whole += json.dumps(plan)
    # 8 KiB pages, where the table has over a thousand.
    assert pages < 700
    # Not one step for each busy User at each row of the front, whatever the planner expected.
    assert "hashed SubPlan" in whole
