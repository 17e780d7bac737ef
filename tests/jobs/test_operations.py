"""What operators see: requests counted without a round trip, `/metrics` for this host or a token, the dashboard."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from accounts.models import ApiKey, User
from acsinfra.core import traffic
from acsinfra.models import RequestCount
from inference.models import BaseModel, Engine
from inference.services import register_engine
from jobs.metrics import may_scrape
from jobs.operations import look_back
from tests.harvest.conftest import make_key, make_model
from tests.jobs.conftest import claimed, submit
from tests.live_server import LiveServer, serve

QUERIES_AT_MOST = 10


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[LiveServer]:
    with serve() as server:
        yield server


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def requests_in(text: str, **labels: str) -> float:
    found = samples(text)
    wanted = labels.items()
    return sum(n for (name, has), n in found.items() if name == "acs_requests_total" and wanted <= dict(has).items())


@pytest.mark.django_db(transaction=True)
def test_requests_are_counted_by_route_status_and_code(server: LiveServer) -> None:
    job = "/v1/harvest/01a19d8b-2892-7afa-8b51-35c9fc2f5572"
    with server.client() as client:
        before = client.get("/metrics")
        assert before.status_code == 200
        assert before.headers["content-type"].startswith("text/plain")
        for path in (job, job, "/v1/nothing/here", "/healthz", "/app"):
            client.get(path)
        after = client.get("/metrics").text

    def grew(**labels: str) -> float:
        return requests_in(after, **labels) - requests_in(before.text, **labels)

    assert grew(route="/v1/harvest/{job_id}", method="GET", status="401", code="invalid_api_key") == 2
    assert grew(route="unknown, below /v1", code="not_found") == 1
    assert grew(route="/healthz", status="200", code="") == 1
    assert grew(route="/app", status="302") == 1
    counted = samples(after)
    labels = frozenset({("route", "/v1/harvest/{job_id}"), ("method", "GET")})
    assert counted["acs_request_seconds_count", labels] >= 2
    assert counted["acs_request_seconds_bucket", labels | {("le", "+Inf")}] >= 2


@pytest.mark.django_db(transaction=True)
def test_the_metrics_tell_of_work_engines_and_money(server: LiveServer, user: User, key: ApiKey) -> None:
    model = make_model()
    engine = register_engine(model=model, kind=Engine.Kind.INFERENCE)
    submit(user, key, model)
    submit(user, key, model)
    claimed(model)
    with server.client() as client:
        found = samples(client.get("/metrics").text)
    job = {("kind", "job"), ("model", model.name)}
    assert found["acs_unfinished_jobs", frozenset({*job, ("status", "queued")})] == 1
    assert found["acs_unfinished_jobs", frozenset({*job, ("status", "running")})] == 1
    state = frozenset({("model", model.name), ("kind", "inference"), ("state", "starting")})
    assert found["acs_engines", state] == 1
    assert found["acs_tokens_held", frozenset()] > 0
    assert found["acs_queue_messages", frozenset({("queue", f"inference.{model.name}")})] == 0
    assert any(name == "acs_engine_heartbeat_age_seconds" and str(engine.pid) in str(has) for name, has in found)


@pytest.mark.parametrize(
    ("address", "headers", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("10.0.0.7", {}, False),
        ("", {}, False),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, False),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.7"}, False),
        ("10.0.0.7", {"Authorization": "Bearer scrape-me"}, True),
        ("127.0.0.1", {"X-Real-Ip": "10.0.0.7", "Authorization": "bearer scrape-me"}, True),
        ("10.0.0.7", {"Authorization": "Bearer é"}, False),
        ("10.0.0.7", {"Authorization": "Bearer "}, False),
    ],
)
def test_who_may_scrape(rf: Any, settings: Any, address: str, headers: dict[str, str], allowed: bool) -> None:
    settings.METRICS_TOKEN = "scrape-me"
    request = rf.get("/metrics", headers=headers, REMOTE_ADDR=address)
    assert may_scrape(request) is allowed
    settings.BEHIND_TLS_PROXY = True
    assert may_scrape(request) is ("Authorization" in headers and allowed)
    settings.METRICS_TOKEN = ""
    assert may_scrape(request) is False


@pytest.mark.django_db(transaction=True)
def test_old_hours_are_added_up_and_no_sum_falls(rf: Any) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    # A server that another test left running may count beside this one.
    kind: dict[str, Any] = {"route": "/v1/old", "method": "GET", "status": 200, "code": "", "bucket": 0}
    for age in (timedelta(0), timedelta(days=33), timedelta(days=34)):
        RequestCount.objects.create(hour=now - age, requests=5, seconds=0.5, **kind)
    assert traffic.fold_old_counts() == 2
    assert traffic.fold_old_counts() == 0
    counted = RequestCount.objects.filter(route="/v1/old")
    assert sorted(counted.values_list("hour", "requests")) == [(traffic.LONG_AGO, 10), (now, 5)]
    # Two processes that add to one row both count.
    request = rf.get("/v1/models")
    for _ in range(2):
        traffic.count_request(request, status=200, code="", seconds=0.3)
        asyncio.run(_flush())
    assert RequestCount.objects.get(route="unknown, below /v1", status=200, bucket=6).requests == 2


async def _flush() -> None:
    from acsinfra.core.db import close_async_pool

    await traffic.flush()
    await close_async_pool()


@pytest.mark.django_db
def test_the_dashboard_shows_now_and_a_window(user: User, model: BaseModel, django_assert_max_num_queries: Any) -> None:
    client = Client(headers={"host": "testserver"})
    client.force_login(User.objects.create_superuser("operator", "operator@example.org"))
    RequestCount.objects.all().delete()
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    kind: dict[str, Any] = {"route": "/v1/completions", "method": "POST", "bucket": 3, "seconds": 1.0}
    for status, code, n in ((200, "", 40), (429, "budget_exceeded", 2), (502, "engine_error", 1)):
        RequestCount.objects.create(hour=now, status=status, code=code, requests=n, **kind)
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    submit(user, make_key(user), model)
    claimed(model)
    with django_assert_max_num_queries(QUERIES_AT_MOST):
        page = client.get("/admin/dashboard/?past=week").content.decode()
    for shown in ("40 answered", "2 refused", "1 failed", "budget_exceeded", "POST /v1/completions", "starting"):
        assert shown in page
    assert f"inference.{model.name}" in page
    assert look_back(timedelta(days=1)).waits[0][:3] == ("job", model.name, 1)
    live = client.get("/admin/dashboard/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in live
    assert "Heartbeat" in live
    stranger = Client(headers={"host": "testserver"})
    stranger.force_login(user)
    assert stranger.get("/admin/dashboard/").status_code == 302
