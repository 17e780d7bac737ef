"""Objects in an S3 bucket, of AWS or any server that speaks its protocol.

Credentials come from the environment, as boto3 finds them. Large objects go up in parts straight from memory, a few at
once; nothing is kept on disk. Links are presigned, which S3 bounds to 7 days.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.utils import timezone

from acsinfra.core.storage import (
    READ_CHUNK_BYTES,
    ObjectNotFoundError,
    ObjectWriter,
    StorageError,
    StorageUnavailableError,
    StoredObject,
    checked_key,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 4
MAX_PARTS = 10_000
LINK_SECONDS_AT_MOST = 7 * 24 * 3600
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NotFound"})
_PASSING_CODES = frozenset({"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling"})


class S3Storage:
    """Objects below `prefix` of `bucket`.

    `endpoint` names a server other than AWS; `public_endpoint` is its address in links, where readers reach it by
    another name than we do.
    """

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        public_endpoint: str | None = None,
    ) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._client = _client(endpoint, region)
        self._link_client = _client(public_endpoint, region) if public_endpoint else self._client
        self._part_uploads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="s3-part")

    def open_writer(self, key: str, *, expected_bytes: int = 0) -> ObjectWriter:
        """Begin an object; nothing is asked of the server before the first part is full."""
        # Parts are 8 MiB, or as large as 10,000 of them need to be.
        part_bytes = max(PART_BYTES, -(-expected_bytes // (MAX_PARTS - 1)))
        return _S3Writer(self._client, self._part_uploads, self.bucket, self._name(key), key, part_bytes)

    def write(self, key: str, data: bytes) -> StoredObject:
        """Write a small object with one request."""
        with self.open_writer(key) as writer:
            writer.write(data)
            return writer.close()

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        with _s3_errors("read from"):
            return self._client.get_object(Bucket=self.bucket, Key=self._name(key))["Body"].read()

    def read_range(self, key: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes `[start, stop)` in chunks."""
        if stop is not None and stop <= start:
            return
        span = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        with _s3_errors("read from"):
            body = self._client.get_object(Bucket=self.bucket, Key=self._name(key), Range=span)["Body"]
            with body:
                yield from body.iter_chunks(READ_CHUNK_BYTES)

    def size(self, key: str) -> int | None:
        """The object's length, or None."""
        try:
            with _s3_errors("read from"):
                return self._client.head_object(Bucket=self.bucket, Key=self._name(key))["ContentLength"]
        except ObjectNotFoundError:
            return None

    def keys(self, prefix: str) -> list[str]:
        """The keys below `prefix/`."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        return sorted(name[skip:] for page in self._pages(prefix) for name in page)

    def delete_prefix(self, prefix: str) -> None:
        """Delete the objects below `prefix/` and abort the uploads there."""
        self.discard_unfinished(prefix)
        for page in self._pages(prefix):
            with _s3_errors("delete from"):
                for name in page:
                    self._client.delete_object(Bucket=self.bucket, Key=name)

    def discard_unfinished(self, prefix: str) -> None:
        """Abort the uploads in parts that nobody completed."""
        with _s3_errors("delete from"):
            try:
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self.bucket, Prefix=self._name(prefix) + "/"
                )
                uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            except ClientError as error:
                # Some servers don't list uploads; their own clean-up has to do.
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 404, 405, 501):
                    return
                raise
            for upload in uploads:
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def link(self, key: str, *, expires_at: datetime, base_url: str) -> str:
        """A presigned link; it ends at `expires_at`, or after the 7 days that S3 allows at most."""
        seconds = int((expires_at - timezone.now()).total_seconds())
        return self._link_client.generate_presigned_url(
            "get_object",
            Params={"Bucket": self.bucket, "Key": self._name(key)},
            ExpiresIn=max(1, min(seconds, LINK_SECONDS_AT_MOST)),
        )

    def check(self) -> None:
        """Raise unless the bucket answers."""
        with _s3_errors("reach"):
            self._client.head_bucket(Bucket=self.bucket)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}" if self.prefix else checked_key(key)

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        with _s3_errors("read from"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._name(prefix) + "/"
            )
            for page in pages:
                yield [found["Key"] for found in page.get("Contents", ())]


class _S3Writer:
    """An object in parts from memory: at most `PARTS_AT_ONCE` on their way beside the one that fills up."""

    def __init__(
        self, client: "S3Client", uploads: ThreadPoolExecutor, bucket: str, name: str, key: str, part_bytes: int
    ) -> None:
        self._client, self._uploads, self._bucket, self._name, self._key = client, uploads, bucket, name, key
        self._part_bytes = part_bytes
        self._part = bytearray()
        self._upload_id: str | None = None
        self._on_their_way: deque[Future[str]] = deque()
        self._etags: list[str] = []
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._bytes += len(view)
        while view:
            room = self._part_bytes - len(self._part)
            self._part += view[:room]
            view = view[room:]
            if len(self._part) == self._part_bytes:
                self._send_part()

    def close(self) -> StoredObject:
        with _s3_errors("write to"):
            if self._upload_id is None:
                # The stubs know no bytearray; botocore does, and copies nothing.
                body: Any = self._part
                self._client.put_object(Bucket=self._bucket, Key=self._name, Body=body)
            else:
                if self._part:
                    self._send_part()
                self._etags += [sent.result() for sent in self._on_their_way]
                self._on_their_way.clear()
                self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._name,
                    UploadId=self._upload_id,
                    MultipartUpload={
                        "Parts": [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(self._etags, start=1)]
                    },
                )
        self._is_closed = True
        self._part = bytearray()
        return StoredObject(key=self._key, bytes=self._bytes, sha256=self._hash.hexdigest())

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._part = bytearray()
        for sent in self._on_their_way:
            sent.cancel()
        # A part that arrives after the abort would be kept, and charged for, by the server.
        for sent in self._on_their_way:
            with suppress(Exception):
                if not sent.cancelled():
                    sent.result()
        if self._upload_id is not None:
            with suppress(BotoCoreError, ClientError):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._name, UploadId=self._upload_id)

    def _send_part(self) -> None:
        with _s3_errors("write to"):
            if self._upload_id is None:
                created = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._name)
                self._upload_id = created["UploadId"]
            while len(self._on_their_way) >= PARTS_AT_ONCE:
                self._etags.append(self._on_their_way.popleft().result())
            number = len(self._etags) + len(self._on_their_way) + 1
            self._on_their_way.append(self._uploads.submit(self._upload_part, number, self._part))
        self._part = bytearray()

    def _upload_part(self, number: int, part: Any) -> str:
        if self._upload_id is None:
            raise AssertionError("a part needs its upload")
        sent = self._client.upload_part(
            Bucket=self._bucket, Key=self._name, UploadId=self._upload_id, PartNumber=number, Body=part
        )
        return sent["ETag"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _client(endpoint: str | None, region: str | None) -> "S3Client":
    # TLS guards the bytes on their way, and our SHA-256 those at rest: without TLS their signature does.
    has_tls = endpoint is None or endpoint.startswith("https://")
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or "us-east-1",
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint else "auto", "payload_signing_enabled": not has_tls},
            # Few servers but AWS know the newer trailing checksums; TLS and our SHA-256 guard the bytes.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": 4},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=PARTS_AT_ONCE + 4,
        ),
    )


@contextmanager
def _s3_errors(doing: str) -> Iterator[None]:
    """Turn boto's errors into ours, keeping S3's own code and no address."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _MISSING_CODES:
            raise ObjectNotFoundError("The storage has no such object.") from error
        kind = StorageUnavailableError if status >= 500 or status == 429 or code in _PASSING_CODES else StorageError
        raise kind(f"Could not {doing} the S3 bucket: {code or status}.") from error
    except BotoCoreError as error:
        raise StorageUnavailableError(f"Could not {doing} the S3 bucket: {type(error).__name__}.") from error
