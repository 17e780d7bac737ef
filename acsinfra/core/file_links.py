"""Links to the files of a storage folder: signed by Django, served without an API key until they expire.

A link is `<base>/files/<token>/<name>`; the token is the object's key and its end, signed with SECRET_KEY (and
SECRET_KEY_FALLBACKS), so nothing but the keys we signed can be asked for. Single ranges and HEAD are served, so that
downloads resume.
"""

import asyncio
import errno
import mimetypes
import os
import re
import stat
import time
from collections.abc import AsyncIterator
from datetime import datetime
from email.utils import formatdate
from http import HTTPStatus
from typing import BinaryIO
from urllib.parse import quote

from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse

from acsinfra.core.errors import ApiError, ErrorCode

CHUNK_BYTES = 256 * 1024
_SALT = "acsinfra.core.file_links"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)
# Linux can say "not in memory yet" instead of waiting for the disk.
_WITHOUT_WAITING: int | None = getattr(os, "RWF_NOWAIT", None)


def base_url(request: HttpRequest) -> str:
    """The address that links begin with: `PUBLIC_URL`, else the one this request came to."""
    return settings.PUBLIC_URL or request.build_absolute_uri("/").rstrip("/")


def folder_link(key: str, *, expires_at: datetime, base_url: str) -> str:
    """A signed link to the object `key`, good until `expires_at`."""
    token = signing.Signer(salt=_SALT).sign_object([key, int(expires_at.timestamp())])
    return f"{base_url}/files/{token}/{quote(key.rpartition('/')[2])}"


async def serve_link(request: HttpRequest, token: str, name: str) -> HttpResponseBase:
    """`GET` and `HEAD` of `/files/<token>/<name>`: 200 or 206 and the bytes, else a JSON error."""
    try:
        if request.method not in ("GET", "HEAD"):
            message = "Only GET and HEAD read a file."
            raise ApiError(ErrorCode.METHOD_NOT_ALLOWED, message, headers={"Allow": "GET, HEAD"})
        file = _open_linked_file(token, name)
    except ApiError as error:
        return JsonResponse(error.body(), status=error.status, headers=error.headers)
    return _answer_with_file(request, file, name)


def _open_linked_file(token: str, name: str) -> BinaryIO:
    """The file that `token` allows to read. ApiError: 403 for a link that is bad or over, 404 for a file now gone."""
    from acsinfra.core.storage import FolderStorage, get_storage

    try:
        key, expires = signing.Signer(salt=_SALT).unsign_object(token)
    except (signing.BadSignature, ValueError):
        raise ApiError(ErrorCode.INVALID_REQUEST, "This link is not one of ours.", status=403) from None
    if time.time() >= expires:
        message = "This link has expired. Ask for the job again: each answer makes new links."
        raise ApiError(ErrorCode.INVALID_REQUEST, message, status=403)
    storage = get_storage()
    gone = ApiError(ErrorCode.NOT_FOUND, "This file is not there any more.")
    if not isinstance(storage, FolderStorage) or key.rpartition("/")[2] != name:
        raise gone
    try:
        file = storage.path_to_serve(key).open("rb", buffering=0)
    except (OSError, ValueError):
        raise gone from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise gone
    return file


def _answer_with_file(request: HttpRequest, file: BinaryIO, name: str) -> HttpResponseBase:
    facts = os.fstat(file.fileno())
    size = facts.st_size
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": mimetypes.guess_type(name)[0] or "application/octet-stream",
        "Content-Disposition": f'attachment; filename="{name}"',
        "ETag": f'"{facts.st_mtime_ns:x}-{size:x}"',
        "Last-Modified": formatdate(facts.st_mtime, usegmt=True),
        "Cache-Control": "private",
        "X-Content-Type-Options": "nosniff",
        "Access-Control-Allow-Origin": "*",
    }
    status, start, stop = HTTPStatus.OK, 0, size
    if request.headers.get("If-Range", headers["ETag"]) in (headers["ETag"], headers["Last-Modified"]):
        asked = _asked_range(request.headers.get("Range", ""), size)
        if asked is not None and asked[0] >= asked[1]:
            file.close()
            error = ApiError(ErrorCode.INVALID_REQUEST, f"The file has {size} bytes; the range lies past them.")
            return JsonResponse(error.body(), status=416, headers={"Content-Range": f"bytes */{size}"})
        if asked is not None:
            status, (start, stop) = HTTPStatus.PARTIAL_CONTENT, asked
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        file.close()
        return HttpResponse(status=status, headers=headers)
    return _FileResponse(file, start, stop, status=status, headers=headers)


def _asked_range(header: str, size: int) -> tuple[int, int] | None:
    """The half-open byte range of a Range header; empty when it cannot be met, None when there is none to honour.

    Several ranges, other units and malformed ones are ignored, as RFC 9110 allows: the whole file is the answer.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if len(first) > 19 or len(last) > 19:
        return None
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


class _FileResponse(StreamingHttpResponse):
    """Streams a part of an open file and closes it with the answer, also when the client left before a byte went."""

    def __init__(self, file: BinaryIO, start: int, stop: int, *, status: int, headers: dict[str, str]) -> None:
        super().__init__(_chunks(file, start, stop), status=status, headers=headers)
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


async def _chunks(file: BinaryIO, start: int, stop: int) -> AsyncIterator[bytes]:
    while start < stop:
        chunk = await _read_at(file.fileno(), min(CHUNK_BYTES, stop - start), start)
        if not chunk:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        yield chunk
        start += len(chunk)


async def _read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read on the event loop what is in memory already; only what waits for a disk costs a thread."""
    if _WITHOUT_WAITING is not None:
        chunk = bytearray(length)
        try:
            return bytes(memoryview(chunk)[: os.preadv(descriptor, [chunk], offset, _WITHOUT_WAITING)])
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
    return await asyncio.to_thread(os.pread, descriptor, length, offset)
