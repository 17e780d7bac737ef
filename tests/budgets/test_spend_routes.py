"""What answers `429 spend_cap` and what goes on, over HTTP."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.db.models.functions import Now

from budgets.models import Hold, SpendLimit
from budgets.spend import forget_spending
from inference import selectors
from inference.models import Engine
from inference.services import mark_live, register_engine
from tests.harvest.conftest import make_model
from tests.live_server import make_key, serve

pytestmark = pytest.mark.django_db(transaction=True)

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}


@pytest.fixture
def client(transactional_db: None) -> Iterator[httpx.Client]:
    model = make_model()
    mark_live(engine=register_engine(model=model, kind=Engine.Kind.INFERENCE))
    selectors._catalogue._fresh_until = 0.0
    forget_spending()
    with serve() as server, server.client(make_key()[1]) as client:
        yield client
    forget_spending()


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_past_the_limit_no_completion_begins_and_none_is_held(client: httpx.Client) -> None:
    SpendLimit.objects.create(usd_per_day=0)
    refused = client.post("/v1/completions", json=COMPLETION)
    assert code(refused) == (429, "spend_cap")
    assert 0 < int(refused.headers["Retry-After"]) <= 86_400
    assert code(client.post("/v1/completions", json={**COMPLETION, "stream": True})) == (429, "spend_cap")
    assert not Hold.objects.exists()
    # The fields and the model come first, and reading goes on.
    assert code(client.post("/v1/completions", json={**COMPLETION, "n": 0})) == (400, "invalid_request")
    assert code(client.post("/v1/completions", json={**COMPLETION, "model": "x"})) == (400, "model_not_found")
    assert client.get("/v1/models").status_code == client.get("/v1/budget").status_code == 200


def test_a_pause_by_hand_refuses_jobs_too_and_is_not_retried(client: httpx.Client) -> None:
    SpendLimit.objects.create(is_paused=True)
    for route, headers in (("completions", {}), ("completion-jobs", {"Idempotency-Key": "a"})):
        refused = client.post(f"/v1/{route}", json=COMPLETION, headers=headers)
        assert code(refused) == (429, "spend_cap")
        assert refused.headers["x-should-retry"] == "false"
        assert "Retry-After" not in refused.headers


def test_a_pause_with_an_end_says_when(client: httpx.Client) -> None:
    SpendLimit.objects.create(is_paused=True, pause_ends_at=Now() + timedelta(seconds=100))
    refused = client.post("/v1/completions", json=COMPLETION)
    assert code(refused) == (429, "spend_cap")
    assert 90 < int(refused.headers["Retry-After"]) <= 100
