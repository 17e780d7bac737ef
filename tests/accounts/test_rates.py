"""600 requests a minute for a key, whichever API process they meet."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from django.test import Client
from pytest_django import Settings
from redis import Redis

from accounts import rates
from accounts.models import ApiKey, User
from acsinfra.core import courier
from acsinfra.core.courier import Courier
from tests.live_server import LiveServer, make_key, make_user, serve

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every request: one whose count a busy machine brings late would pass uncounted."""
    monkeypatch.setattr(rates, "PATIENCE_SECONDS", 30.0)
    monkeypatch.setattr(rates, "_away_until", 0.0)


def ask(client: httpx.Client) -> int:
    return client.get("/v1/budget").status_code


def is_wait_of(seconds: int, refused: httpx.Response, *, began: float) -> bool:
    """Whether an answer asks to wait for what is left of `seconds` since a moment after `began` (Unix time)."""
    left = int(refused.headers["Retry-After"])
    return left <= seconds and int(began) + seconds <= int(time.time()) + left


def move_back(settings: Settings, key: ApiKey, seconds: int) -> None:
    """Make what was counted older by `seconds`."""
    with Redis.from_url(settings.BROKER_URL, decode_responses=True) as redis:
        name = f"acs:rate:{key.pk}"
        counted: dict[str, Any] = redis.hgetall(name)
        redis.delete(name)
        shifted = {str(int(second) - seconds): n for second, n in counted.items() if second.isdigit()}
        oldest = int(counted["oldest"]) - seconds
        redis.hset(name, mapping={**shifted, "total": counted["total"], "oldest": oldest})


def test_past_the_rate_a_request_is_refused_and_told_when(server: LiveServer, settings: Settings) -> None:
    key, text = make_key(make_user(requests_per_minute=5))
    with server.client(text) as client:
        began = time.time()
        assert [ask(client) for _ in range(5)] == [200] * 5
        refused = client.get("/v1/budget")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limited", None)
        assert "5 requests a minute" in error["message"]
        assert is_wait_of(60, refused, began=began)
        assert "x-should-retry" not in refused.headers
        # The rate comes before the size, the method and the body.
        assert client.post("/v1/completions", content=b"x" * 11_000_000).status_code == 429
        assert client.post("/v1/completions", content=b"{").status_code == 429
        move_back(settings, key, 50)
        assert is_wait_of(10, client.get("/v1/budget"), began=began)
        move_back(settings, key, 10)
        assert [ask(client) for _ in range(6)] == [200] * 5 + [429]


def test_what_was_refused_does_not_count_and_room_comes_back_bit_by_bit(server: LiveServer, settings: Settings) -> None:
    key, text = make_key(make_user(requests_per_minute=4))
    with server.client(text) as client:
        began = time.time()
        assert [ask(client) for _ in range(2)] == [200] * 2
        move_back(settings, key, 30)
        assert [ask(client) for _ in range(5)] == [200] * 2 + [429] * 3
        assert is_wait_of(30, client.get("/v1/budget"), began=began)
        move_back(settings, key, 30)
        assert [ask(client) for _ in range(3)] == [200] * 2 + [429]
        move_back(settings, key, 200)
        assert [ask(client) for _ in range(5)] == [200] * 4 + [429]


def test_of_many_at_once_on_two_processes_as_many_as_may_pass(server: LiveServer) -> None:
    _, text = make_key(make_user(requests_per_minute=50))
    with (
        serve() as second,
        server.client(text) as one,
        second.client(text) as two,
        ThreadPoolExecutor(16) as threads,
    ):
        statuses = list(threads.map(ask, [one, two] * 40))
    assert (statuses.count(200), statuses.count(429)) == (50, 30)


def test_each_key_has_its_own_rate(server: LiveServer) -> None:
    user = make_user(requests_per_minute=1)
    for _ in range(2):
        _, text = make_key(user)
        with server.client(text) as client:
            assert [ask(client), ask(client)] == [200, 429]


def test_the_rate_of_a_user_without_an_override_is_the_settings(server: LiveServer, settings: Settings) -> None:
    settings.REQUESTS_PER_MINUTE = 2
    key, text = make_key()
    with server.client(text) as client:
        assert [ask(client) for _ in range(3)] == [200, 200, 429]
        # What an operator changes counts from the next request on.
        User.objects.filter(pk=key.user_id).update(requests_per_minute=4)
        assert [ask(client) for _ in range(3)] == [200, 200, 429]
        User.objects.filter(pk=key.user_id).update(requests_per_minute=0)
        assert ask(client) == 429


def test_a_key_that_is_none_is_a_401_and_counts_for_nobody(server: LiveServer, settings: Settings) -> None:
    key, text = make_key(make_user(requests_per_minute=2))
    with server.client(text) as client:
        assert ask(client) == 200
        ApiKey.objects.filter(pk=key.pk).update(paused_at="2026-01-01T00:00:00Z")
        assert [ask(client) for _ in range(4)] == [401] * 4


def test_without_the_broker_reading_goes_on_uncounted(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = make_key(make_user(requests_per_minute=1))
    settings.BROKER_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(rates, "PATIENCE_SECONDS", 1.0)
    # Longer than 20 requests take on any machine.
    monkeypatch.setattr(rates, "AWAY_SECONDS", 3600.0)
    waits: list[str] = []

    def shared_courier() -> Courier:
        waits.append("asked")
        return courier.shared_courier()

    monkeypatch.setattr(rates, "shared_courier", shared_courier)
    with serve() as server, server.client(text) as client:
        assert [ask(client) for _ in range(20)] == [200] * 20
    # One wait for the broker, not one for each.
    assert len(waits) == 1


def test_the_app_is_counted_for_its_user_and_not_for_their_keys(server: LiveServer) -> None:
    user = make_user(requests_per_minute=2)
    _, text = make_key(user)
    browser = Client()
    browser.force_login(user)
    cookies = {"sessionid": browser.cookies["sessionid"].value}
    with server.client(cookies=cookies) as app, server.client(text) as client:
        answers = [app.get("/app/workbench/models") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "rate_limited"
        assert ask(client) == 200
