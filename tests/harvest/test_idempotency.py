"""A Harvest job that is asked for with an Idempotency-Key is made, held for and charged once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pytest_django import Settings

from accounts.models import ApiKey
from budgets.limits import set_monthly_tokens
from budgets.models import Hold, SpendLimit
from budgets.selectors import imbalances
from budgets.spend import forget_spending
from harvest import services
from harvest.models import HarvestJob
from inference.models import BaseModel, Engine
from inference.services import register_engine
from tests.harvest.child import RESULT
from tests.harvest.conftest import OWNER, claim, error, held
from tests.live_server import LiveServer, make_key

pytestmark = pytest.mark.django_db(transaction=True)


def submit_once(client: httpx.Client, key: str | bytes, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompts": ["Hello"], **fields}
    sent = key.encode() if isinstance(key, str) else key
    return client.post("/v1/harvest", json=body, headers={b"Idempotency-Key": sent})


def test_a_retry_answers_the_job_as_it_is_now(client: httpx.Client, key_and_text: tuple[ApiKey, str]) -> None:
    first = submit_once(client, "a")
    assert first.status_code == 202
    retry = submit_once(client, "a")
    assert (retry.status_code, retry.json()) == (200, first.json())
    spaced = b'{"prompts" : [ "Hello" ],\n "model":"tiny"}'
    headers = {"Idempotency-Key": "a", "Content-Type": "application/json"}
    assert client.post("/v1/harvest", content=spaced, headers=headers).status_code == 200
    client.delete(f"/v1/harvest/{first.json()['job_id']}")
    # Whatever would refuse it now: the answer is there.
    set_monthly_tokens(user=key_and_text[0].user, monthly_tokens=0)
    SpendLimit.objects.create(is_paused=True)
    forget_spending()
    retry = submit_once(client, "a")
    assert (retry.status_code, retry.json()["status"]) == (200, "cancelled")
    assert HarvestJob.objects.count() == 1
    SpendLimit.objects.all().delete()
    forget_spending()


def test_a_key_is_the_users_and_of_one_request(
    client: httpx.Client, server: LiveServer, key_and_text: tuple[ApiKey, str]
) -> None:
    first = submit_once(client, "a").json()
    conflict = submit_once(client, "a", prompts=["Other"])
    assert error(conflict) == (409, "idempotency_conflict", "Idempotency-Key")
    assert conflict.headers["x-should-retry"] == "false"
    # Also where the fields are wrong: the replay is looked for before them.
    assert error(submit_once(client, "a", shard_size=0))[:2] == (409, "idempotency_conflict")
    _, text = make_key(key_and_text[0].user)
    with server.client(text) as of_the_same_user:
        assert submit_once(of_the_same_user, "a").json()["job_id"] == first["job_id"]
    _, text = make_key()
    with server.client(text) as stranger:
        assert submit_once(stranger, "a").status_code == 202


@pytest.mark.parametrize("key", [b"", b"a" * 256, b"a\tb", "a\u0080".encode(), "a\u200b".encode()])
def test_a_key_that_cannot_be_one_is_refused(client: httpx.Client, key: bytes) -> None:
    assert error(submit_once(client, key)) == (400, "invalid_request", "Idempotency-Key")
    assert not HarvestJob.objects.exists()


def test_a_refusal_does_not_use_the_key_up(client: httpx.Client, settings: Settings, tiny: BaseModel) -> None:
    assert submit_once(client, "a", shard_size=0).status_code == 400
    assert submit_once(client, "b", layers=[9]).status_code == 400
    assert submit_once(client, "a").status_code == submit_once(client, "b").status_code == 202
    settings.RUNNER_GRACE /= 60
    Engine.objects.all().delete()
    refused = submit_once(client, "c")
    assert error(refused) == (503, "harvest_unavailable", None)
    register_engine(model=tiny, kind=Engine.Kind.RUNNER)
    retry = submit_once(client, "c")
    assert (retry.status_code, retry.json()["job_id"] != refused.json()["job_id"]) == (202, True)


def test_the_same_key_at_the_same_instant_makes_one_job_and_one_hold(server: LiveServer, tiny: BaseModel) -> None:
    key, text = make_key()
    with server.client(text, limits=httpx.Limits(max_connections=32)) as client, ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: submit_once(client, "a"), range(32)))
        assert sorted(answer.status_code for answer in answers) == [200] * 31 + [202]
        assert len({answer.json()["job_id"] for answer in answers}) == 1
        assert (HarvestJob.objects.count(), Hold.objects.count(), held(client)) == (1, 1, 6)
        claim(tiny)
        services.finish_harvest(job_id=HarvestJob.objects.get().pk, owner=OWNER, tokens=4, result=RESULT)
        assert client.get("/v1/budget").json()["used"] == 4
    assert imbalances(user=key.user) == []
