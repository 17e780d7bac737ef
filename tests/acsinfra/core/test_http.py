"""Whatever is sent below /v1, the answer is the JSON error object, with a request id and CORS headers."""

import json
import random
import re
from typing import Any

import httpx
import pytest

from tests.live_server import LiveServer, RawAnswer, make_key

ROUTE = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def check_error(answer: RawAnswer | httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check an error answer's shape and headers and return its error object."""
    actual = answer.status if isinstance(answer, RawAnswer) else answer.status_code
    body = answer.body if isinstance(answer, RawAnswer) else answer.content
    error: dict[str, Any] = json.loads(body)["error"]
    assert (actual, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "code", "param"}
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(body)
    check_headers(answer)
    return error


def check_headers(answer: RawAnswer | httpx.Response) -> None:
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed == {"X-Request-Id", "Retry-After", "Location", "X-Acs-Longpoll"}
    assert "access-control-allow-credentials" not in answer.headers


def raw(server: LiveServer, head: str, body: bytes = b"", key: str | None = None) -> RawAnswer:
    """Send a request line and headers as they are."""
    lines = [head, f"Content-Length: {len(body)}"]
    if "Host:" not in head:
        lines.append("Host: localhost")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return server.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/none",
        "/v1/completions/",
        "/v1/harvest/not-an-id",
        "/v1//models",
        "//v1/models",
        "/v1/%00",
        "/v1/%ff%fe",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_route_is_a_json_404(server: LiveServer, key: str, path: str, method: str) -> None:
    check_error(raw(server, f"{method} {path} HTTP/1.1", key=key), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/a%0Ab", "/v1/%0D%0AX-Evil:1", "/v1/" + "a" * 20_000, "/v1/%2e%2e/admin", "/v1/\xe9"]
)
def test_an_odd_path_is_a_404_too(server: LiveServer, path: str) -> None:
    answer = raw(server, f"GET {path} HTTP/1.1")
    assert answer.status in (404, 400)
    if answer.status == 404:
        check_error(answer, 404, "not_found")
    assert "x-evil" not in answer.headers


def test_chat_is_answered_with_what_to_use_instead(server: LiveServer, key: str) -> None:
    with server.client(key) as client:
        error = check_error(client.post(ROUTE, json={"model": "m"}), 400, "chat_completions_unsupported")
    assert "/v1/completions" in error["message"]


def test_the_order_is_key_then_media_type_then_json(server: LiveServer, key: str) -> None:
    with server.client() as client:
        check_error(client.post(ROUTE, content=b"{", headers=JSON), 401, "invalid_api_key")
    with server.client(key) as client:
        check_error(
            client.post(ROUTE, content=b"{", headers={"Content-Type": "text/plain"}), 415, "unsupported_media_type"
        )
        check_error(client.post(ROUTE, content=b"{", headers=JSON), 400, "bad_json")


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=rot13",
        "application/json; charset=" + "x" * 20_000,
        "application/json; charset*=nonsense''x",
        "application/json; charset=\xe9",
        "\xff\xfe",
        "a" * 50_000,
        ";",
        "multipart/form-data",
        "multipart/form-data; boundary=" + "b" * 5_000,
    ],
)
def test_an_unreadable_content_type_is_a_415(server: LiveServer, key: str, content_type: str) -> None:
    answer = raw(server, f"POST {ROUTE} HTTP/1.1\r\nContent-Type: {content_type}", b"{}", key)
    check_error(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("%ff", "chat_completions_unsupported"),
        ("\xff\xfe=1", "chat_completions_unsupported"),
        ("a=%00", "invalid_request"),
        ("&".join("a=1" for _ in range(3_000)), "invalid_request"),
        ("[]=;", "chat_completions_unsupported"),
        ("?" * 9_000, "chat_completions_unsupported"),
    ],
)
def test_a_query_string_of_any_bytes_is_survived(server: LiveServer, key: str, query: str, code: str) -> None:
    answer = raw(server, f"POST {ROUTE}?{query} HTTP/1.1\r\nContent-Type: application/json", b"{}", key)
    if answer.headers.get("content-type") != "application/json":
        assert (answer.status, answer.body) == (400, b"Invalid HTTP request received.")  # uvicorn's: it is no HTTP
    else:
        check_error(answer, 400, code)


@pytest.mark.parametrize("host", ["evil.example", "", "local host", "localhost:notaport", "\xe9", "a" * 10_000, "[::1"])
def test_a_host_that_is_not_ours_is_a_json_400(server: LiveServer, host: str) -> None:
    answer = raw(server, f"GET /v1/models HTTP/1.1\r\nHost: {host}")
    check_error(answer, 400, "invalid_request")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer {key} x",
        "Bearer {key}\r\nAuthorization: Bearer {key}",
        "Bearer sk-acs-" + "a" * 43,
        "Bearer sk-acs-" + "a" * 60_000,
        "Bearer sk-acs-\xe9\xff",
        "Bearer acs-bm-",
    ],
)
def test_a_wrong_authorization_is_one_401(server: LiveServer, key: str, authorization: str) -> None:
    answer = raw(server, f"POST {ROUTE} HTTP/1.1\r\nAuthorization: {authorization.replace('{key}', key)}", b"{}")
    error = check_error(answer, 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_scheme_is_read_in_any_case(server: LiveServer, key: str) -> None:
    answer = raw(server, f"POST {ROUTE} HTTP/1.1\r\nAuthorization: bearer {key}", b"{}")
    check_error(answer, 400, "chat_completions_unsupported")


def test_a_wrong_method_is_a_405_that_names_the_right_ones(server: LiveServer, key: str) -> None:
    for method in ("GET", "PUT", "PATCH", "DELETE", "TRACE", "PURGE", "PROPFIND"):
        answer = raw(server, f"{method} {ROUTE} HTTP/1.1", b"{}", key)
        check_error(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "POST, OPTIONS"


def test_a_handler_s_name_is_no_method(server: LiveServer, key: str) -> None:
    for method in ("DISPATCH", "ADMIT", "as_view"):
        answer = raw(server, f"{method} {ROUTE} HTTP/1.1", key=key)
        assert answer.status in (400, 405)


def test_head_has_get_s_headers_and_no_body(server: LiveServer, key: str) -> None:
    with server.client(key) as client:
        got, head = client.get("/v1/models"), client.head("/v1/models")
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    check_headers(head)


def test_a_preflight_is_answered_without_a_key(server: LiveServer) -> None:
    asked = {"Origin": "https://lab.example", "Access-Control-Request-Method": "POST"}
    with server.client() as client:
        answer = client.options(
            ROUTE, headers={**asked, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
        )
        odd = client.options(ROUTE, headers={**asked, "Access-Control-Request-Headers": "<script>"})
        plain = client.options("/v1/models")
        unknown = client.options("/v1/none", headers=asked)
    assert (answer.status_code, answer.content) == (204, b"")
    check_headers(answer)
    assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert odd.headers["access-control-allow-headers"] == "Authorization, Content-Type, Idempotency-Key"
    assert plain.headers["allow"] == "GET, OPTIONS, HEAD"
    check_error(unknown, 404, "not_found")


@pytest.mark.parametrize("origin", ["https://lab.example", "null"])
def test_any_origin_may_read_answers_and_errors(server: LiveServer, key: str, origin: str) -> None:
    with server.client(key, headers={"Authorization": f"Bearer {key}", "Origin": origin}) as client:
        check_headers(client.get("/v1/models"))
        check_headers(client.get("/v1/none"))
    with server.client() as client:
        check_headers(client.get("/v1/models", headers={"Origin": origin}))


def test_request_ids_are_never_the_client_s_nor_twice_the_same(server: LiveServer) -> None:
    with server.client() as client:
        ids = {client.get("/v1/none", headers={"X-Request-Id": "mine"}).headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20
    assert "mine" not in ids


def test_malformed_bodies_of_all_kinds_are_400s(server: LiveServer, key: str) -> None:
    """Bodies made by breaking good ones; the same ones at each run."""
    random_source = random.Random(7)
    good = json.dumps({"model": "m", "prompt": ["é", "\ud800", "\0"], "n": 1, "x": [1.5, None, {"y": "\\"}]}).encode()
    with server.client(key) as client:
        for _ in range(250):
            body = bytearray(good)
            for _ in range(random_source.randint(1, 4)):
                at = random_source.randrange(len(body))
                match random_source.randrange(4):
                    case 0:
                        body[at] = random_source.randrange(256)
                    case 1:
                        del body[at : at + random_source.randrange(1, 5)]
                    case 2:
                        body[at:at] = random_source.choice(
                            [b"[" * 3_000, b"9" * 5_000, b"\\ud800", b"\x00", b"NaN", b"}"]
                        )
                    case 3:
                        body[at:at] = body[: random_source.randrange(20)]
                body = body or bytearray(b" ")
            answer = client.post(ROUTE, content=bytes(body), headers=JSON)
            error = check_error(answer, 400, answer.json()["error"]["code"])
            assert error["code"] in {"bad_json", "invalid_request", "chat_completions_unsupported"}


def test_the_log_line_names_the_request_and_keeps_the_key_secret(
    server: LiveServer, caplog: pytest.LogCaptureFixture, transactional_db: None
) -> None:
    key, text = make_key()
    with caplog.at_level("INFO", logger="acsinfra.requests"), server.client(text) as client:
        answer = client.post(ROUTE, json={"prompt": "a private prompt"})
    records: list[Any] = [record.msg for record in caplog.records if record.name == "acsinfra.requests"]
    [line] = [record for record in records if record["request_id"] == answer.headers["x-request-id"]]
    assert (line["method"], line["path"], line["status"]) == ("POST", ROUTE, 400)
    assert (line["user_id"], line["key_prefix"]) == (key.user_id, key.prefix)
    assert line["ms"] >= 0
    assert text not in caplog.text
    assert "private" not in caplog.text


def test_a_websocket_is_refused(server: LiveServer) -> None:
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13"
    answer = raw(server, f"GET {ROUTE} HTTP/1.1\r\n{upgrade}\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    assert answer.status == 403
