"""A table of Completion Jobs as after years: many ended, many waiting; and how long claims take on it."""

import time
import uuid
from typing import Any

import msgspec
import zstandard
from django.conf import settings
from django.db import connection, transaction

from acsinfra.core.leases import RunningLimit, claim_next
from inference.models import BaseModel
from inference.wire import CompletionWork, Sampling
from jobs.models import CompletionJob
from jobs.running import claim_job
from tests.benchmarks.figures import Quantiles, quantiles

OWNERS = 1_000
# The waiting ones belong to fewer Users, each with a long line.
WAITING_OWNERS = 100
HOLD_TOKENS = 24

_USERS = """
INSERT INTO accounts_user (username, email, password, first_name, last_name, is_staff, is_active, is_superuser,
                           date_joined)
SELECT 'rows-' || n, 'rows-' || n || '@bench.invalid', '!', '', '', false, true, false, now()
  FROM generate_series(1, %(owners)s) n
"""
_COLUMNS = """
INSERT INTO jobs_completionjob (
    id, user_id, base_model_id, model, status, hold_tokens, hold_id, charged_tokens, created_at, started_at,
    finished_at, expires_at, has_files, is_erased, claims, tries, setbacks)
"""
# A Job a minute ended; each has its result.
_ENDED = (
    _COLUMNS
    + """
SELECT uuidv7(-(n || ' minutes')::interval), owner.ids[1 + n %% %(owners)s], %(model_id)s, %(model)s, 'succeeded',
       %(tokens)s, gen_random_uuid(), %(tokens)s, now() - (n || ' minutes')::interval,
       now() - (n || ' minutes')::interval, now() - (n || ' minutes')::interval, now() + '30 days',
       false, false, 1, 0, 0
  FROM generate_series(1, %(rows)s) n, (SELECT array_agg(id) AS ids FROM accounts_user WHERE email LIKE 'rows-%%') owner
"""
)
_RESULTS = """
INSERT INTO jobs_jobresult (job_id, status, body, key, bytes)
SELECT id, 200, '\\x7b7d', '', 2 FROM jobs_completionjob WHERE status = 'succeeded'
"""
_WAITING = (
    _COLUMNS
    + """
SELECT uuidv7(), owner.ids[1 + n %% %(waiting_owners)s], %(model_id)s, %(model)s, 'queued', %(tokens)s, NULL, NULL,
       clock_timestamp(), NULL, NULL, NULL, false, false, 0, 0, 0
  FROM generate_series(1, %(rows)s) n, (SELECT array_agg(id) AS ids FROM accounts_user WHERE email LIKE 'rows-%%') owner
"""
)
_REQUESTS = """
INSERT INTO jobs_jobrequest (job_id, work_zstd)
SELECT id, %(work)s FROM jobs_completionjob WHERE status = 'queued' AND user_id = ANY (
    SELECT id FROM accounts_user WHERE email LIKE 'rows-%%')
"""


def fill(*, model_name: str, ended: int, waiting: int) -> dict[str, Any]:
    """Insert `ended` Jobs of 1,000 new Users, with their results, and `waiting` ones of 100 of these Users.

    Returns the `rows` that the table has then, and the `seconds` it took. For a database of the benchmark's own.
    """
    began = time.perf_counter()
    model = BaseModel.objects.get(name=model_name)
    values: dict[str, Any] = {
        "owners": OWNERS,
        "waiting_owners": WAITING_OWNERS,
        "model_id": model.pk,
        "model": model.name,
        "tokens": HOLD_TOKENS,
        "work": zstandard.compress(msgspec.json.encode(_work(model))),
    }
    with connection.cursor() as cursor:
        with transaction.atomic():
            cursor.execute(_USERS, values)
            cursor.execute(_ENDED, values | {"rows": ended})
            cursor.execute(_RESULTS)
            cursor.execute(_WAITING, values | {"rows": waiting})
            cursor.execute(_REQUESTS, values)
        if not connection.in_atomic_block:
            # What autovacuum has long done in a table that grew by itself.
            cursor.execute("VACUUM (ANALYZE) jobs_completionjob, jobs_jobresult, jobs_jobrequest")
    return {"rows": CompletionJob.objects.count(), "seconds": round(time.perf_counter() - began, 1)}


def time_claims(*, model_name: str, claims: int) -> dict[str, Any]:
    """The times of `claims` claims of a row alone (`claim`), and of as many with the Hold and the work (`take`)."""
    model_id = BaseModel.objects.get(name=model_name).pk
    limit = RunningLimit(column="jobs_running", default=settings.JOBS_RUNNING)
    waiting = CompletionJob.objects.filter(base_model_id=model_id, status=CompletionJob.Status.QUEUED).count()
    claimed: list[float] = []
    taken: list[float] = []
    for _ in range(claims):
        began = time.perf_counter()
        row = claim_next(CompletionJob, base_model_id=model_id, owner=uuid.uuid4(), lease=settings.LEASE, limit=limit)
        claimed.append(time.perf_counter() - began)
        began = time.perf_counter()
        job = claim_job(base_model_id=model_id, owner=uuid.uuid4())
        taken.append(time.perf_counter() - began)
        assert row is not None
        assert job is not None
    return {"waiting": waiting, "claim": _rounded(quantiles(claimed)), "take": _rounded(quantiles(taken))}


def _rounded(figures: Quantiles) -> dict[str, float]:
    return {name: round(value, 3) for name, value in msgspec.structs.asdict(figures).items()}


def _work(model: BaseModel) -> CompletionWork:
    return CompletionWork(
        request_id="req_bench",
        model=model.name,
        served_model_name=model.served_model_name,
        created=0,
        deadline=0.0,
        prompts=((5, 6, 7, 8, 9, 10, 11, 12),),
        prompt_texts=(None,),
        sampling=Sampling(max_tokens=16),
        hold_tokens=HOLD_TOKENS,
    )
