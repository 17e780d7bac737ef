"""A link to a file of the storage folder needs no key, reads that file alone, and ends."""

import asyncio
import json
import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.core import signing
from django.http import HttpResponseBase, StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils import timezone
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pytest_django import Settings

from acsinfra.core.file_links import CHUNK_BYTES, _asked_range, base_url, folder_link, serve_link
from acsinfra.core.storage import get_storage

KEY = "harvest/run/shard_00000.safetensors"
CONTENT = os.urandom(2 * CHUNK_BYTES + 1234)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, settings: Settings) -> Path:
    settings.SECRET_KEY = "a-secret-of-the-tests"
    settings.STORAGE_URL = f"file://{tmp_path}"
    (tmp_path.parent / "outside").write_bytes(b"not yours")
    get_storage().write(KEY, CONTENT)
    return tmp_path


async def get(link: str, method: str = "GET", **headers: str) -> tuple[HttpResponseBase, bytes]:
    _, _, token, name = urlsplit(link).path.split("/", 3)
    request = AsyncRequestFactory().generic(method, urlsplit(link).path, headers=headers)
    response = await serve_link(request, token, name)
    if isinstance(response, StreamingHttpResponse):
        body = b"".join([chunk async for chunk in response.streaming_content])  # type: ignore[union-attr]
    else:
        body = response.content  # type: ignore[attr-defined]
    response.close()
    return response, body


def link(key: str = KEY, *, seconds: float = 60) -> str:
    return folder_link(key, expires_at=timezone.now() + timedelta(seconds=seconds), base_url="https://acs.example")


async def test_a_link_reads_the_file() -> None:
    response, body = await get(link())
    assert (response.status_code, body) == (200, CONTENT)
    assert response["Content-Length"] == str(len(CONTENT))
    assert response["Content-Type"] == "application/octet-stream"
    assert response["Content-Disposition"] == 'attachment; filename="shard_00000.safetensors"'
    assert response["Accept-Ranges"] == "bytes"


async def test_head_says_the_size_and_sends_nothing() -> None:
    response, body = await get(link(), "HEAD")
    assert (response.status_code, response["Content-Length"], body) == (200, str(len(CONTENT)), b"")


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        (f"bytes={CHUNK_BYTES - 1}-{CHUNK_BYTES + 1}", CHUNK_BYTES - 1, CHUNK_BYTES + 2),
        ("bytes=500000-", 500_000, len(CONTENT)),
        ("bytes=-7", len(CONTENT) - 7, len(CONTENT)),
        (f"bytes=5-{10**18}", 5, len(CONTENT)),
    ],
)
async def test_a_range_is_a_206(asked: str, start: int, stop: int) -> None:
    response, body = await get(link(), Range=asked)
    assert (response.status_code, body) == (206, CONTENT[start:stop])
    assert response["Content-Range"] == f"bytes {start}-{stop - 1}/{len(CONTENT)}"
    assert response["Content-Length"] == str(stop - start)


@pytest.mark.parametrize("asked", [f"bytes={len(CONTENT)}-", "bytes=999999999-1000000000", "bytes=-0"])
async def test_a_range_past_the_end_is_a_416(asked: str) -> None:
    response, body = await get(link(), Range=asked)
    assert response.status_code == 416
    assert response["Content-Range"] == f"bytes */{len(CONTENT)}"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("asked", ["bytes=1-2,5-6", "items=1-2", "bytes=9-3", "bytes=-", "bytes=x-y", "nonsense"])
async def test_a_range_that_is_none_gets_the_whole_file(asked: str) -> None:
    response, body = await get(link(), Range=asked)
    assert (response.status_code, body) == (200, CONTENT)


async def test_if_range_honours_only_the_same_file() -> None:
    etag = (await get(link()))[0]["ETag"]
    assert (await get(link(), Range="bytes=0-3", **{"If-Range": etag}))[1] == CONTENT[:4]
    response, body = await get(link(), Range="bytes=0-3", **{"If-Range": '"another"'})
    assert (response.status_code, body) == (200, CONTENT)


async def test_a_link_ends() -> None:
    response, body = await get(link(seconds=-1))
    assert response.status_code == 403
    error = json.loads(body)["error"]
    assert "expired" in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_tampered_link_is_refused() -> None:
    good = link()
    token = good.split("/")[4]
    for position in range(0, len(token), 7):
        changed = token[:position] + ("A" if token[position] != "A" else "B") + token[position + 1 :]
        response, body = await get(good.replace(token, changed))
        assert response.status_code == 403
        assert CONTENT[:16] not in body


async def test_a_link_signed_with_a_retired_secret_works_while_that_is_listed(settings: Settings) -> None:
    old = link()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another-secret", ["a-secret-of-the-tests"]
    assert (await get(old))[0].status_code == 200
    settings.SECRET_KEY_FALLBACKS = []
    assert (await get(old))[0].status_code == 403


async def test_another_signature_of_ours_is_no_link() -> None:
    token = signing.Signer(salt="another purpose").sign_object([KEY, 2**33])
    assert (await get(f"https://acs.example/files/{token}/shard_00000.safetensors"))[0].status_code == 403


async def test_a_link_names_its_own_file_only() -> None:
    assert (await get(link().replace("shard_00000", "shard_00001")))[0].status_code == 404


@pytest.mark.parametrize("key", ["../outside", "/etc/passwd", "harvest/../../outside"])
async def test_even_a_signed_path_cannot_leave_the_folder(key: str) -> None:
    response, body = await get(link(key))
    assert response.status_code == 404
    assert b"not yours" not in body


async def test_a_deleted_file_is_a_404() -> None:
    good = link()
    get_storage().delete_prefix("harvest/run")
    response, body = await get(good)
    assert (response.status_code, json.loads(body)["error"]["code"]) == (404, "not_found")


async def test_only_reading_is_allowed() -> None:
    response, body = await get(link(), "POST")
    assert (response.status_code, response["Allow"]) == (405, "GET, HEAD")
    assert json.loads(body)["error"]["code"] == "method_not_allowed"


async def test_an_answer_that_nobody_reads_leaves_no_open_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        token, name = link().split("/")[4:6]
        response = await serve_link(AsyncRequestFactory().get("/"), token, name)
        response.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


async def test_many_readers_at_once_each_get_the_whole() -> None:
    bodies = await asyncio.gather(*(get(link()) for _ in range(50)))
    assert all(body == CONTENT for _, body in bodies)


def test_public_url_begins_every_link(settings: Settings) -> None:
    request = RequestFactory(headers={"host": "10.0.0.5:8000"}).get("/v1/harvest/1")
    settings.ALLOWED_HOSTS = ["10.0.0.5"]
    settings.PUBLIC_URL = ""
    assert base_url(request) == "http://10.0.0.5:8000"
    settings.PUBLIC_URL = "https://acs.example/infra"
    assert base_url(request) == "https://acs.example/infra"


@examples(max_examples=300, deadline=None)
@given(
    st.one_of(st.text(max_size=30), st.from_regex(r"bytes=\d{0,25}-\d{0,25}", fullmatch=True)), st.integers(0, 2**63)
)
def test_no_range_header_reads_outside_the_file(header: str, size: int) -> None:
    asked = _asked_range(header, size)
    if asked is not None and asked[0] < asked[1]:
        assert 0 <= asked[0] < asked[1] <= size
