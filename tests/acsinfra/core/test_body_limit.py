"""A body past its limit is a 413 after the key was checked, and is never kept."""

import resource
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings

from acsinfra.asgi import application
from acsinfra.core.body_limit import BODY_PASSED_LIMIT, BodyLimit
from tests.live_server import LiveServer, read_answer

ROUTE = "/v1/chat/completions"
LIMIT = settings.MAX_BODY_BYTES


def json_of(length: int) -> bytes:
    return b'{"a":"' + b"x" * (length - 8) + b'"}'


def post(
    server: LiveServer, body: bytes | Iterator[bytes], key: str | None, path: str = ROUTE
) -> tuple[int, dict[str, Any]]:
    with server.client(key) as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()["error"]


def chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100_000):
        yield body[start : start + 100_000]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_limit_itself_is_taken_and_a_byte_more_is_not(server: LiveServer, key: str, is_chunked: bool) -> None:
    for length, status, code in ((LIMIT, 400, "chat_completions_unsupported"), (LIMIT + 1, 413, "request_too_large")):
        body = json_of(length)
        got, error = post(server, chunks(body) if is_chunked else body, key)
        assert (got, error["code"], error["param"]) == (status, code, None)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_key_is_checked_before_the_size(server: LiveServer, is_chunked: bool, transactional_db: None) -> None:
    body = json_of(LIMIT + 1)
    for key in (None, "sk-acs-" + "a" * 43):
        status, error = post(server, chunks(body) if is_chunked else body, key)
        assert (status, error["code"]) == (401, "invalid_api_key")


def test_only_harvest_takes_larger_bodies(server: LiveServer, key: str) -> None:
    body = json_of(LIMIT + 1)
    assert post(server, body, key, "/v1/completions")[0] == 413
    assert post(server, body, key, "/v1/harvest/")[0] != 200
    status, error = post(server, json_of(settings.MAX_HARVEST_BODY_BYTES + 1), key, "/v1/harvest")
    assert (status, error["code"]) == (413, "request_too_large")
    assert post(server, body, key, "/v1/harvest")[0] == 400


def test_a_declared_length_is_answered_before_the_body_comes(server: LiveServer, key: str) -> None:
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    answer = server.send(f"{head}Content-Type: application/json\r\nContent-Length: {10**15}\r\n\r\n".encode())
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert f"{LIMIT:,}" in answer.error["message"]


def test_an_endless_body_costs_no_memory(server: LiveServer, key: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabyte = b"x" * 1_000_000
    with server.connect() as connection:
        connection.sendall(
            f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(120):
            connection.sendall(b"F4240\r\n" + megabyte + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_answer(connection).status == 413
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 60_000


def test_a_large_form_to_a_page_is_refused_too(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post("/app/sign-in", content=b"username=" + b"x" * LIMIT)
    assert answer.status_code == 413


def test_nothing_is_read_of_a_request_without_a_key(server: LiveServer) -> None:
    head = b"POST /v1/harvest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = server.send(head + b"Content-Length: 40000000\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    with server.client() as client:
        assert client.request("OPTIONS", ROUTE, content=b"{}").status_code == 204
        assert client.post("/v1/none", content=b"{}").status_code == 404


@pytest.mark.parametrize("begun", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_stops_coming_is_not_waited_for(
    server: LiveServer, key: str, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application.app, "stall_seconds", 0.2)
    host = b" HTTP/1.1\r\nHost: localhost\r\n"
    head = b"POST " + ROUTE.encode() + host + b"Content-Type: application/json\r\nAuthorization: Bearer "
    answer = server.send(head + key.encode() + b"\r\n" + begun)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["message"].startswith("The body stopped coming")
    assert server.send(b"POST /app/sign-in" + host + begun).status == 400


async def test_the_application_sees_at_most_the_limit_and_then_only_the_disconnect() -> None:
    seen: list[bytes] = []
    events = [{"type": "http.request", "body": b"x" * 40, "more_body": True} for _ in range(10)]
    incoming = iter([*events, {"type": "http.disconnect"}])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (event := await receive())["more_body"]:
            seen.append(event["body"])
        assert event["body"] == b""
        assert scope[BODY_PASSED_LIMIT] == 100
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Any:
        return next(incoming)

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
    limited: Any = BodyLimit(app, limit_of=lambda scope: 100)
    await limited(scope, receive, None)
    assert len(b"".join(seen)) == 80
    assert next(incoming, None) is None
