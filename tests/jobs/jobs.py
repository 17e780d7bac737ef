"""Jobs through the whole product, as a researcher has them: submitted, waited for, fetched."""

import secrets
import time
from typing import Any

import httpx

from tests.stack import Stack, StackUser

KEYS = {
    *("cancel_requested", "created_at", "expires_at", "finished_at", "id", "model", "request_id", "result_expired"),
    *("result_url", "started_at", "status", "status_url", "usage_pending"),
}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
# Work of some seconds, however fast the machine: 60 sequences of 480 tokens.
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": ["The capital"] * 60,
    "max_tokens": 480,
    "temperature": 0,
    "ignore_eos": True,
}
ENDED = ("succeeded", "failed", "cancelled")


def post_job(client: httpx.Client, body: dict[str, Any], *, key: str | None = None) -> httpx.Response:
    """Submit a Job, under a new Idempotency-Key or the given one."""
    return client.post("completion-jobs", json=body, headers={"Idempotency-Key": key or secrets.token_hex(8)})


def submit(client: httpx.Client, body: dict[str, Any], *, key: str | None = None) -> dict[str, Any]:
    """Submit a Job that is accepted, and return it."""
    answer = post_job(client, body, key=key)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def read(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """Read a Job."""
    answer = client.get(f"completion-jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    assert set(job) == KEYS
    return job


def wait_for(
    client: httpx.Client, job_id: str, *, until: tuple[str, ...] = ENDED, seconds: float = 240
) -> dict[str, Any]:
    """Wait until a Job has one of these statuses."""
    deadline = time.monotonic() + seconds
    while (job := read(client, job_id))["status"] not in until:
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


def result_of(client: httpx.Client, job_id: str) -> httpx.Response:
    """Wait for a Job to end, and fetch its result."""
    wait_for(client, job_id)
    return client.get(f"completion-jobs/{job_id}/result")


def budget(client: httpx.Client) -> tuple[int, int]:
    """What the User's Budget says: used and held."""
    answer = client.get("budget").json()
    return answer["used"], answer["held"]


MONEY = """
from django.db.models import Sum
from budgets.models import Budget, Hold, LedgerEntry
from budgets.selectors import imbalances
jobs = LedgerEntry.objects.filter(work_kind="job", budget__user_id=user)
result = {
    "used": Budget.objects.get(user_id=user).used,
    "held": Budget.objects.get(user_id=user).held,
    "charges": {entry.work_id: entry.tokens for entry in jobs},
    "live": Hold.objects.filter(budget__user_id=user, state="live").count(),
    "wrong": len(imbalances()),
}
"""


def money(stack: Stack, user: StackUser) -> dict[str, Any]:
    """What the User's Budget and ledger say: `charges` of Jobs by id."""
    found: dict[str, Any] = stack.django(MONEY, user=user.id)
    return found
