"""What tests of Jobs share."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from accounts.models import ApiKey, User
from acsinfra.core.ids import new_uuid7
from budgets.models import Budget, Hold, LedgerEntry
from inference.models import BaseModel
from inference.wire import CompletionWork, Sampling
from jobs import running
from jobs.models import CompletionJob
from jobs.running import ClaimedJob
from jobs.submitting import submit_job
from tests.harvest.conftest import make_key, make_model, make_user

OWNER = uuid.UUID(int=1)
PROMPT_TOKENS = 3
HOLD_TOKENS = 13


def work_for(job_id: uuid.UUID, model: BaseModel, **changes: Any) -> CompletionWork:
    """Return the work of a prompt of 3 tokens and 10 to generate, or with these changes."""
    fields: dict[str, Any] = {
        "request_id": f"req_job_{job_id.hex}",
        "model": model.name,
        "served_model_name": model.served_model_name,
        "created": 0,
        "deadline": 0.0,
        "prompts": ((5, 6, 7),),
        "prompt_texts": (None,),
        "sampling": Sampling(max_tokens=HOLD_TOKENS - PROMPT_TOKENS),
        "hold_tokens": HOLD_TOKENS,
    }
    return CompletionWork(**{**fields, **changes})


def submit(user: User, key: ApiKey | None, model: BaseModel, **changes: Any) -> CompletionJob:
    """Put a Job in line; changes are of its work, or the IdempotentRequest `request`."""
    job_id = new_uuid7()
    request = changes.pop("request", None)
    work = work_for(job_id, model, **changes)
    return submit_job(user=user, api_key=key, base_model_id=model.pk, job_id=job_id, work=work, request=request)


def claim(model: BaseModel, owner: uuid.UUID = OWNER) -> ClaimedJob | None:
    """Claim the model's next Job for `owner`."""
    return running.claim_job(base_model_id=model.pk, owner=owner)


def claimed(model: BaseModel, owner: uuid.UUID = OWNER) -> CompletionJob:
    """Claim the model's next Job, which there is, and return its row."""
    job = claim(model, owner)
    assert job is not None
    return CompletionJob.objects.get(pk=job.id)


def let_the_lease_run_out(job: CompletionJob) -> None:
    """Put the end of a Job's lease into the past, as a dead worker would leave it."""
    running_job = CompletionJob.objects.filter(pk=job.pk, status="running")
    running_job.update(lease_expires_at=timezone.now() - timedelta(seconds=1))


def assert_money(user: User, *, used: int, held: int = 0) -> None:
    """Assert what the User's Budget says, and that ledger and live Holds add up to it."""
    budget = Budget.objects.get(user=user)
    assert (budget.used, budget.held) == (used, held)
    assert sum(LedgerEntry.objects.filter(budget=budget).values_list("tokens", flat=True)) == used
    live = Hold.objects.filter(budget=budget, state=Hold.State.LIVE)
    assert sum(live.values_list("tokens", flat=True)) == held


@pytest.fixture
def model(db: None) -> BaseModel:
    """Return a Base model's row."""
    return make_model()


@pytest.fixture
def user(db: None) -> User:
    """Return a User with the default limits."""
    return make_user("ada")


@pytest.fixture
def key(user: User) -> ApiKey:
    """Return a key of `user`."""
    return make_key(user)
