"""What a view of the API may do, and what becomes of it: waiting, streaming, failing, being left by its client."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.views import unknown_route
from tests.live_server import LiveServer
from tests.tcp_proxy import proxy_to

FAULTS: dict[str, Exception] = {
    "bug": KeyError("secret"),
    "recursion": RecursionError("secret"),
    "gone": Http404("secret"),
    "away": psycopg.OperationalError("secret"),
    "header": ApiError(ErrorCode.QUEUE_FULL, "Wait.", headers={"Retry-After": "7"}, extra={"job_id": "j"}),
}
told: list[str] = []


class EchoView(ApiView):
    async def get(self, request: Request) -> Response:
        key: Any = request.auth
        return Response({"user": request.user.username, "key": key.prefix}, headers={"Location": "/v1/x"})

    async def post(self, request: Request) -> Response:
        assert request.data is self.json
        return Response(self.json, status=202)

    async def delete(self, request: Request) -> HttpResponse:
        return HttpResponse(b"{}", content_type="application/json")


class CancelView(ApiView):
    takes_json = False

    async def post(self, request: Request) -> Response:
        return Response(None, status=204)


class FaultView(ApiView):
    async def get(self, request: Request, name: str) -> Response:
        raise FAULTS[name]


class WaitView(ApiView):
    async def get(self, request: Request) -> Response:
        told.append("waiting")
        try:
            await asyncio.sleep(float(request.query_params["seconds"]))
        except asyncio.CancelledError:
            told.append("cancelled")
            raise
        return Response({})


class StreamView(ApiView):
    async def get(self, request: Request) -> StreamingHttpResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                for number in range(int(request.query_params["n"])):
                    yield b"data: %d\n\n" % number
                    while "go on" not in told:  # noqa: ASYNC110 (the test's thread tells it)
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.02)
            finally:
                told.append("stream closed")

        return StreamingHttpResponse(chunks(), content_type="text/event-stream")


urlpatterns = [
    path("v1/echo", EchoView.as_view()),
    path("v1/cancel", CancelView.as_view()),
    path("v1/fault/<str:name>", FaultView.as_view()),
    path("v1/wait", WaitView.as_view()),
    path("v1/stream", StreamView.as_view()),
    path("v1/<path:rest>", lambda request, rest: unknown_route(request)),
]


@pytest.fixture
def client(server: LiveServer, key: str, settings: Any) -> Iterator[httpx.Client]:
    settings.ROOT_URLCONF = __name__
    told.clear()
    with server.client(key) as client:
        yield client


# For what happens at once, on a machine that is busy; no view here ends by itself as soon.
PATIENCE_SECONDS = 50


def wait_until_told(what: str) -> None:
    """Wait until a view tells `what`."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while what not in told:
        assert time.monotonic() < give_up_at, f"{what!r} was not told"
        time.sleep(0.01)


def test_a_handler_has_the_user_the_key_and_the_object_that_was_sent(client: httpx.Client) -> None:
    got = client.get("/v1/echo")
    assert got.json()["key"].startswith("sk-acs-")
    assert got.json()["user"].startswith("user")
    assert got.headers["location"] == "/v1/x"
    body = {"a": ["é", 1, None, 1.5, {"b": True}]}
    posted = client.post("/v1/echo", json=body)
    assert (posted.status_code, posted.json(), posted.headers["content-type"]) == (202, body, "application/json")
    assert posted.content == '{"a":["é",1,null,1.5,{"b":true}]}'.encode()
    assert client.delete("/v1/echo").content == b"{}"
    assert client.put("/v1/echo").headers["allow"] == "GET, POST, DELETE, HEAD, OPTIONS"


def test_a_large_body_is_parsed_beside_the_event_loop(client: httpx.Client) -> None:
    body = {"prompts": ["x" * 1_000] * 4_000}
    assert client.post("/v1/echo", json=body).json() == body


def test_a_post_without_a_body_needs_none(client: httpx.Client) -> None:
    answer = client.post("/v1/cancel")
    assert (answer.status_code, answer.content) == (204, b"")
    assert client.post("/v1/cancel", content=b"not json").status_code == 204


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("bug", 500, "internal_error"),
        ("recursion", 500, "internal_error"),
        ("gone", 404, "not_found"),
        ("away", 503, "service_unavailable"),
        ("header", 429, "queue_full"),
    ],
)
def test_a_view_that_fails_answers_an_error_object(client: httpx.Client, name: str, status: int, code: str) -> None:
    answer = client.get(f"/v1/fault/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["access-control-allow-origin"] == "*"
    if name == "header":
        assert (answer.headers["retry-after"], answer.json()["job_id"]) == ("7", "j")


async def test_waiting_requests_cost_no_threads(client: httpx.Client, server: LiveServer) -> None:
    async with httpx.AsyncClient(
        base_url=server.url, headers=client.headers, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as many:
        await many.get("/v1/wait?seconds=0")
        before = threading.active_count()
        waiting = [asyncio.create_task(many.get("/v1/wait?seconds=3")) for _ in range(100)]
        n_told = 1 + len(waiting)
        while told.count("waiting") < n_told and not all(task.done() for task in waiting):  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.02)
        during = threading.active_count()
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    assert during - before <= 2


def test_a_client_that_goes_away_cancels_the_view(
    client: httpx.Client, server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    authorization = client.headers["authorization"]
    with caplog.at_level("INFO"):
        with server.connect() as connection:
            head = f"Host: localhost\r\nAuthorization: {authorization}\r\n\r\n"
            connection.sendall(f"GET /v1/wait?seconds=60 HTTP/1.1\r\n{head}".encode())
            wait_until_told("waiting")
        wait_until_told("cancelled")
        # The line is logged behind the view.
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while not (statuses := logged_statuses(caplog, "/v1/wait")):
            assert time.monotonic() < give_up_at, "the request was not logged"
            time.sleep(0.01)
    assert statuses == [499]


def logged_statuses(caplog: pytest.LogCaptureFixture, path: str) -> list[int]:
    """Return the statuses of the requests of `path` that were logged."""
    lines: list[Any] = [record.msg for record in list(caplog.records) if record.name == "acsinfra.requests"]
    return [line["status"] for line in lines if line["path"] == path]


def test_a_stream_is_sent_as_it_is_made(client: httpx.Client) -> None:
    with client.stream("GET", "/v1/stream?n=5") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-request-id"].startswith("req_")
        chunks = answer.iter_raw()
        # It is here, and the view makes no other before it is told to.
        assert next(chunks) == b"data: 0\n\n"
        told.append("go on")
        assert b"".join(chunks) == b"".join(b"data: %d\n\n" % number for number in range(1, 5))
    assert told == ["go on", "stream closed"]


def test_a_client_that_leaves_a_stream_closes_it(client: httpx.Client) -> None:
    told.append("go on")
    with client.stream("GET", "/v1/stream?n=100000") as answer:
        next(answer.iter_raw())
    wait_until_told("stream closed")


def test_an_upload_that_breaks_off_leaves_nothing_behind(client: httpx.Client, server: LiveServer) -> None:
    authorization = client.headers["authorization"]
    with server.connect() as connection:
        connection.sendall(
            f"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nAuthorization: {authorization}\r\n"
            'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"a":'.encode()
        )
    assert client.get("/v1/echo").status_code == 200


@contextmanager
def database_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut the way of every new pool to the database."""
    from django.db import connections

    settings = connections["default"].settings_dict
    with proxy_to(int(settings["PORT"])) as proxy:
        proxy.cut()
        with monkeypatch.context() as patched:
            patched.setitem(settings, "PORT", proxy.port)
            yield


def test_a_database_that_is_away_is_a_503_within_seconds(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.live_server import serve

    with database_away(monkeypatch), serve() as server, server.client(key) as client:
        started = time.monotonic()
        answer = client.post("/v1/chat/completions", json={})
        assert time.monotonic() - started < 8
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["retry-after"] == "5"
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["database"], ready.json()["broker"]) == (503, "unavailable", "ok")
        assert client.get("/healthz").status_code == 200
