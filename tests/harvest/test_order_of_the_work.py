"""The next job of a model is the oldest of the User who has the fewest running there."""

import json
import string
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection

from acsinfra.core import leases
from harvest import services
from harvest.models import HarvestJob
from inference.models import BaseModel
from tests.harvest.conftest import LEASE, OWNER, claim, make_key, make_model, make_user, plan_for

RESULT = {"manifest_key": "m", "stats_key": "s", "bytes_written": 5, "timings": {}}


def submit_for(names: str, model: BaseModel) -> dict[uuid.UUID, str]:
    """Submit a job for each letter's User, in this order; return whose each job is."""
    users = {name: make_user(name, harvests_unfinished=10_000) for name in sorted(set(names))}
    keys = {name: make_key(user) for name, user in users.items()}
    plan = plan_for(model)
    return {services.submit_harvest(user=users[name], api_key=keys[name], plan=plan).pk: name for name in names}


@pytest.mark.django_db
def test_users_take_turns_and_each_users_jobs_run_oldest_first() -> None:
    model = make_model()
    whose = submit_for("aaabbc", model)
    ids = list(whose)
    taken = [claim(model).pk for _ in range(6)]
    assert claim(model) is None
    # a, b and c have none running; then one each: the oldest job decides; at last only a waits.
    assert "".join(whose[job_id] for job_id in taken) == "abcaba"
    for name in "abc":
        assert [job_id for job_id in taken if whose[job_id] == name] == [i for i in ids if whose[i] == name]


@pytest.mark.django_db
def test_a_user_whose_jobs_end_comes_earlier_again() -> None:
    model = make_model()
    whose = submit_for("aaab", model)
    first = claim(model)
    assert whose[first.pk] == "a"
    services.finish_harvest(job_id=first.pk, owner=OWNER, tokens=1, result=RESULT)
    assert whose[claim(model).pk] == "a"
    assert whose[claim(model).pk] == "b"


@pytest.mark.django_db
def test_jobs_of_other_models_neither_run_nor_count() -> None:
    model, other = make_model(), make_model("other")
    submit_for("ab", other)
    assert claim(other)
    assert claim(model) is None


@pytest.mark.django_db(transaction=True)
def test_runners_that_claim_at_once_get_different_jobs_in_fair_order() -> None:
    model = make_model()
    whose = submit_for("aaaaaabbbccc", model)

    def claim_one(number: int) -> uuid.UUID:
        try:
            job = claim(model, uuid.UUID(int=number + 1))
            return job.pk  # type: ignore[no-any-return]
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as runners:
        taken = list(runners.map(claim_one, range(6)))
    assert len(set(taken)) == 6
    assert Counter(whose[job_id] for job_id in taken) == {"a": 2, "b": 2, "c": 2}


@pytest.mark.django_db
def test_a_claim_reads_a_few_rows_of_each_waiting_user_however_many_jobs_there_are() -> None:
    model = make_model()
    submit_for(string.ascii_lowercase[:20], model)
    columns = [field.attname for field in HarvestJob._meta.concrete_fields]
    unique = {"id": "gen_random_uuid()", "run_id": "gen_random_uuid()", "hold_id": "NULL"}
    fresh = [unique.get(name, name) for name in columns]
    ended = [
        {"status": "'cancelled'", "completed_at": "now()", "tokens": "0"}.get(name, value)
        for name, value in zip(columns, fresh, strict=True)
    ]
    claim_values: dict[str, Any] = {"model": model.pk, "owner": OWNER, "lease": LEASE}
    with connection.cursor() as cursor:
        for values, copies in ((fresh, 1_000), (ended, 1)):
            cursor.execute(
                f"INSERT INTO harvest_harvestjob ({', '.join(columns)}) SELECT {', '.join(values)} "
                f"FROM harvest_harvestjob CROSS JOIN generate_series(1, {copies})"
            )
        cursor.execute("ANALYZE harvest_harvestjob")
        cursor.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + leases.claim_queries(HarvestJob, None)[-1],
            claim_values,
        )
        (plan,) = cursor.fetchone()[0]
    assert HarvestJob.objects.count() > 40_000
    assert "Seq Scan" not in json.dumps(plan)
    # 8 KiB pages: some ten for each of 20 Users, where the table has over a thousand.
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 500
