"""A User's limits, set on the User's page of the admin, count at the next request of a running API, and go again."""

import uuid
from collections.abc import Iterator

import httpx
import pytest
from django.test import Client

from accounts.models import ApiKey, User
from inference import selectors
from inference.models import BaseModel, Engine
from inference.services import register_engine
from tests.budgets.test_admin import filled
from tests.jobs.conftest import claim
from tests.live_server import make_key, serve

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def own() -> tuple[ApiKey, str]:
    return make_key()


@pytest.fixture
def client(own: tuple[ApiKey, str], model: BaseModel) -> Iterator[httpx.Client]:
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    selectors._catalogue._fresh_until = 0.0
    with serve() as server, server.client(own[1]) as client:
        yield client


def limit(operator: Client, user: User, **limits: int | str) -> None:
    """Set limits as an operator does; "" takes one away."""
    page = operator.get(f"/admin/accounts/user/{user.pk}/change/")
    answer = operator.post(page.request["PATH_INFO"], filled(page) | limits)
    assert answer.status_code == 302


def code_of(answer: httpx.Response) -> str:
    """The code of an answer's error; empty for none."""
    return "" if answer.is_success else str(answer.json()["error"]["code"])


def submit_job(client: httpx.Client) -> str:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
    return code_of(client.post("/v1/completion-jobs", json=body, headers={"Idempotency-Key": uuid.uuid4().hex}))


def submit_harvest(client: httpx.Client) -> str:
    return code_of(client.post("/v1/harvest", json={"model": "tiny", "prompts": ["Hello"]}))


def test_each_limit_counts_at_the_next_request_and_goes_again(
    client: httpx.Client, own: tuple[ApiKey, str], model: BaseModel, admin_client: Client
) -> None:
    user = own[0].user

    limit(admin_client, user, jobs_unfinished=1)
    assert [submit_job(client) for _ in range(2)] == ["", "job_capacity"]
    limit(admin_client, user, jobs_unfinished="", jobs_running=0)
    assert submit_job(client) == ""
    assert claim(model) is None
    limit(admin_client, user, jobs_running=1)
    assert [claim(model) is not None for _ in range(2)] == [True, False]
    limit(admin_client, user, jobs_running="")
    assert claim(model) is not None

    assert [submit_harvest(client) for _ in range(2)] == ["", "harvest_concurrency_exceeded"]
    limit(admin_client, user, harvests_unfinished=9)
    assert submit_harvest(client) == ""
    limit(admin_client, user, harvests_per_month=2)
    assert submit_harvest(client) == "harvest_quota_exceeded"
    limit(admin_client, user, harvests_per_month="", storage_quota_bytes=1)
    assert submit_harvest(client) == "corpus_too_large"
    limit(admin_client, user, storage_quota_bytes="", harvest_waits_at_once=0)
    [job, *_] = client.get("/v1/harvest").json()["data"]
    assert "X-Acs-Longpoll" in client.get(f"/v1/harvest/{job['job_id']}?wait=5").headers

    limit(admin_client, user, requests_per_minute=1)
    assert code_of(client.get("/v1/budget")) == "rate_limited"
    limit(admin_client, user, requests_per_minute="")
    assert code_of(client.get("/v1/budget")) == ""
