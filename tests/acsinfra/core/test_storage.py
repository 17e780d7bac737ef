"""Objects are whole or not there, in a folder and in S3 alike."""

import hashlib
import os
import urllib.error
import urllib.request
import uuid
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders
from django.utils import timezone
from urllib3 import HTTPResponse

from acsinfra.core.storage import (
    FolderStorage,
    ObjectNotFoundError,
    Storage,
    StorageError,
    StorageUnavailableError,
    storage_from_url,
)
from acsinfra.core.storage_s3 import PART_BYTES, S3Storage
from tests.s3_server import S3Server, s3_server

__all__ = ["s3_server"]


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return storage_from_url(f"file://{tmp_path}/files")
    server: S3Server = request.getfixturevalue("s3_server")
    return storage_from_url(f"s3://{server.bucket}/{uuid.uuid4().hex}?endpoint={server.endpoint}")


@pytest.mark.parametrize("length", [0, 1, 100_000, 2 * PART_BYTES, 5 * PART_BYTES + 12_345])
def test_an_object_comes_back_as_it_was_written(storage: Storage, length: int) -> None:
    data = os.urandom(length)
    with storage.open_writer("run/shard.safetensors", expected_bytes=length) as writer:
        for start in range(0, length, 3_000_001):
            writer.write(memoryview(data)[start : start + 3_000_001])
        assert storage.size("run/shard.safetensors") is None
        stored = writer.close()
    assert (stored.key, stored.bytes) == ("run/shard.safetensors", length)
    assert stored.sha256 == hashlib.sha256(data).hexdigest()
    assert storage.size("run/shard.safetensors") == length
    assert storage.read("run/shard.safetensors") == data
    assert storage.keys("run") == ["run/shard.safetensors"]


def test_a_buffer_may_be_reused_after_write(storage: Storage) -> None:
    buffer = bytearray(PART_BYTES)
    with storage.open_writer("run/large") as writer:
        for value in range(6):
            buffer[:] = bytes([value]) * PART_BYTES
            writer.write(buffer)
        writer.close()
    assert storage.read("run/large") == b"".join(bytes([value]) * PART_BYTES for value in range(6))


def test_a_range_is_read_in_chunks(storage: Storage) -> None:
    data = os.urandom(3_500_000)
    storage.write("run/object", data)
    chunks = list(storage.read_range("run/object", start=10, stop=3_400_000))
    assert max(map(len, chunks)) <= 1024 * 1024
    assert b"".join(chunks) == data[10:3_400_000]
    assert b"".join(storage.read_range("run/object", start=3_000_000)) == data[3_000_000:]
    assert b"".join(storage.read_range("run/object", start=7, stop=7)) == b""


def test_what_was_not_closed_was_never_there(storage: Storage) -> None:
    def write_and_fail() -> None:
        with storage.open_writer("run/half") as writer:
            writer.write(os.urandom(2 * PART_BYTES + 1))
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        write_and_fail()
    assert storage.keys("run") == []
    assert storage.size("run/half") is None
    with pytest.raises(ObjectNotFoundError):
        storage.read("run/half")


def test_a_second_writer_replaces_the_object(storage: Storage) -> None:
    storage.write("run/object", b"first and longer")
    storage.write("run/object", b"second")
    assert storage.read("run/object") == b"second"


def test_deleting_a_prefix_takes_only_what_is_below_it(storage: Storage) -> None:
    for key in ("a/1", "a/b/2", "ab/3"):
        storage.write(key, b"x")
    storage.delete_prefix("a")
    storage.delete_prefix("a")
    assert storage.keys("ab") == ["ab/3"]
    assert storage.keys("a") == []


def test_what_a_killed_writer_left_is_discarded(storage: Storage, tmp_path: Path) -> None:
    storage.write("run/whole", b"x")
    writer = storage.open_writer("run/half")
    writer.write(os.urandom(PART_BYTES + 1))
    storage.discard_unfinished("run")
    assert storage.keys("run") == ["run/whole"]
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(StorageError):
        writer.close()
    writer.abort()


@pytest.mark.parametrize("key", ["../x", "a/../b", "/a", "a//b", "", "a/.hidden", "a/b/", "ä", "a b", "a\nb"])
def test_a_key_cannot_leave_its_place(storage: Storage, key: str) -> None:
    with pytest.raises(ValueError, match="not a storage key"):
        storage.write(key, b"x")


@pytest.mark.parametrize("url", ["", "folder", "file://host/x", "s3://", "s3://b/p?endpont=x", "http://x/y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="STORAGE_URL"):
        storage_from_url(url)


def test_a_storage_that_is_away_says_so_without_its_address(unused_s3: S3Storage) -> None:
    with pytest.raises(StorageUnavailableError) as caught:
        unused_s3.check()
    assert "127.0.0.1" not in str(caught.value)


@pytest.fixture
def unused_s3(s3_server: S3Server) -> S3Storage:
    # Port 1 of loopback: nothing listens there.
    return S3Storage(bucket="bucket", endpoint="http://127.0.0.1:1")


def test_a_bucket_that_is_missing_is_an_error(s3_server: S3Server) -> None:
    with pytest.raises(StorageError):
        S3Storage(bucket="nowhere", endpoint=s3_server.endpoint).check()
    S3Storage(bucket=s3_server.bucket, endpoint=s3_server.endpoint).check()


def test_a_full_or_closed_folder_is_an_error_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageUnavailableError) as caught:
        FolderStorage(tmp_path / "file").write("run/object", b"x")
    assert str(tmp_path) not in str(caught.value)


def test_a_presigned_link_reads_one_object_until_it_expires(s3_server: S3Server) -> None:
    storage = storage_from_url(s3_server.url)
    storage.write("run/object", b"0123456789")
    link = storage.link("run/object", expires_at=timezone.now() + timedelta(minutes=5), base_url="http://unused")
    with urllib.request.urlopen(link) as answer:
        assert answer.read() == b"0123456789"
    with urllib.request.urlopen(urllib.request.Request(link, headers={"Range": "bytes=2-4"})) as answer:
        assert answer.read() == b"234"
    for tampered in (link.replace("object", "other"), link[:-1] + ("0" if link[-1] != "0" else "1")):
        assert _status(tampered) == 403


def test_a_presigned_link_carries_its_end_under_the_signature(s3_server: S3Server) -> None:
    storage = storage_from_url(s3_server.url)
    storage.write("run/object", b"0123456789")
    link = storage.link("run/object", expires_at=timezone.now() + timedelta(seconds=90), base_url="http://unused")
    (seconds,) = parse_qs(urlsplit(link).query)["X-Amz-Expires"]
    assert 85 <= int(seconds) <= 90
    assert _status(link) == 200
    assert _status(link.replace(f"X-Amz-Expires={seconds}", "X-Amz-Expires=600000")) == 403


def test_a_presigned_link_never_outlives_seven_days(s3_server: S3Server) -> None:
    link = storage_from_url(s3_server.url).link(
        "run/object", expires_at=timezone.now() + timedelta(days=30), base_url="http://unused"
    )
    assert "X-Amz-Expires=604800" in link


def test_a_presigned_link_may_name_the_server_as_readers_reach_it(s3_server: S3Server) -> None:
    storage = storage_from_url(s3_server.url + "&public_endpoint=https://files.example")
    link = storage.link("run/object", expires_at=timezone.now() + timedelta(days=1), base_url="http://unused")
    assert link.startswith("https://files.example/bucket/kept/run/object?")


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_payload_is_hashed_for_its_signature_only_where_no_tls_guards_it(s3_server: S3Server, scheme: str) -> None:
    storage = S3Storage(bucket="bucket", endpoint=f"{scheme}://127.0.0.1:1")
    sent: list[str] = []

    def answer(request: AWSPreparedRequest, **_: Any) -> Any:
        sha256 = request.headers["X-Amz-Content-SHA256"]
        sent.append(sha256.decode() if isinstance(sha256, bytes) else sha256)
        return AWSResponse(request.url, 200, HTTPHeaders(), HTTPResponse(BytesIO(), preload_content=False))

    storage._client.meta.events.register("before-send.s3.PutObject", answer)
    stored = storage.write("a/file", b"content")
    assert stored.sha256 == hashlib.sha256(b"content").hexdigest()
    assert sent == [stored.sha256 if scheme == "http" else "UNSIGNED-PAYLOAD"]
