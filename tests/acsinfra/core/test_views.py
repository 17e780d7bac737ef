"""Health, readiness, the OpenAPI document, ids and times."""

import re
import time
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.urls import resolve

from acsinfra.core.ids import new_request_id, new_uuid7
from acsinfra.core.times import iso_utc_ms
from tests.live_server import LiveServer, serve


def test_healthz_needs_neither_key_nor_host(server: LiveServer) -> None:
    answer = server.send(
        b"GET /healthz HTTP/1.1\r\nHost: 10.0.0.7\r\nConnection: close\r\nAccept-Encoding: identity\r\n\r\n"
    )
    assert answer.status == 200


def test_readyz_tells_of_every_part(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "database": "ok", "broker": "ok", "storage": "ok"}


@pytest.fixture
def unready(settings: Any, tmp_path: Any, server: LiveServer) -> LiveServer:
    """Return the API with a broker that refuses and a storage that is a file's child."""
    (tmp_path / "file").touch()
    settings.BROKER_URL = "redis://127.0.0.1:1/0"
    settings.STORAGE_URL = (tmp_path / "file" / "below").as_uri()
    return server


def test_readyz_names_the_parts_that_are_away(unready: LiveServer) -> None:
    with unready.client() as client:
        answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert {name: answer.json()[name] for name in ("database", "broker", "storage")} == {
        "database": "ok",
        "broker": "unavailable",
        "storage": "unavailable",
    }


def test_the_openapi_document_is_for_anyone_and_knows_the_key(server: LiveServer) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert "/v1/models" in document["paths"]


def test_lifespan_opens_in_order_and_closes_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import asynccontextmanager

    from acsinfra.core import lifespan

    told: list[str] = []

    def opener(name: str) -> lifespan.Opener:
        @asynccontextmanager
        async def open_it() -> Any:
            told.append(f"open {name}")
            yield
            told.append(f"close {name}")

        return open_it

    monkeypatch.setattr(lifespan, "_openers", [opener("a"), opener("b")])
    with serve() as server, server.client() as client:
        assert client.get("/healthz").status_code == 200
        assert told == ["open a", "open b"]
    assert told == ["open a", "open b", "close b", "close a"]


def test_ids_are_of_their_kind_and_sort_by_time() -> None:
    ids = [new_uuid7() for _ in range(100)]
    assert {made.version for made in ids} == {7}
    assert ids == sorted(ids)
    assert abs((ids[0].int >> 80) / 1000 - time.time()) < 5
    assert isinstance(ids[0], uuid.UUID)
    assert re.fullmatch("req_[0-9a-f]{32}", new_request_id())


def test_times_are_utc_with_milliseconds() -> None:
    assert iso_utc_ms(datetime(2026, 11, 3, 9, 30, 0, 123_999, tzinfo=UTC)) == "2026-11-03T09:30:00.123+00:00"
    assert (
        iso_utc_ms(datetime(2026, 11, 3, 9, 30, tzinfo=timezone(timedelta(hours=2)))) == "2026-11-03T07:30:00.000+00:00"
    )


def test_the_catch_all_is_below_v1_alone() -> None:
    assert resolve("/v1/nothing").func.__name__ == "unknown_route"
    assert resolve("/v1").func.__name__ == "unknown_route"
