"""The files of a Harvest job, by links that need no key: resumed where they broke off, and held to their SHA-256."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from acsinfra.client.errors import CONNECTION_FAILED, CORRUPTED_DOWNLOAD, AcsError, error_of, retry_after_seconds

CHUNK_BYTES: Final = 1024 * 1024
LINK_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 60.0
LONGEST_PAUSE_SECONDS: Final = 15.0
# A link that has expired, or whose signature the storage does not know any more.
_LINK_IS_OVER: Final = (400, 401, 403, 404, 410)


class Stopped(Exception):
    """The harvest ends before its downloads."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download. `find_link(is_renewed)` gives its link, a new one when asked."""

    name: str
    bytes: int
    sha256: str
    find_link: Callable[[bool], str]


def files_client(n_connections: int) -> httpx.Client:
    """An HTTP client for links: without the API key, which no storage needs to see."""
    limits = httpx.Limits(max_connections=n_connections, max_keepalive_connections=n_connections)
    timeout = httpx.Timeout(SILENT_SECONDS, connect=10.0, pool=None)
    return httpx.Client(timeout=timeout, limits=limits, follow_redirects=True)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDownload:
    """The download of one file into `folder`: `NAME.part` until it is whole and its hash is right, then `NAME`."""

    def __init__(
        self,
        http: httpx.Client,
        file: RemoteFile,
        folder: Path,
        *,
        patience_s: float,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._http = http
        self._file = file
        self._path = folder / file.name
        self._part = folder / f"{file.name}.part"
        self._patience_s = patience_s
        self._stop = stop
        self._on_bytes = on_bytes

    def run(self) -> None:
        """Download what is missing. Raises AcsError: `corrupted_download` after two wrong files, `connection_failed`.

        A file that is there already, and whole, is not fetched again.
        """
        if self._is_there():
            self._on_bytes(self._file.bytes)
            return
        for _ in range(2):
            digest = self._fetch()
            if digest == self._file.sha256:
                self._part.replace(self._path)
                return
            self._on_bytes(-self._part.stat().st_size)
            self._part.unlink()
        raise AcsError(
            f"{self._file.name} does not have the SHA-256 that the manifest says, downloaded twice.",
            code=CORRUPTED_DOWNLOAD,
        )

    def _is_there(self) -> bool:
        return (
            self._path.exists()
            and self._path.stat().st_size == self._file.bytes
            and file_sha256(self._path) == self._file.sha256
        )

    def _fetch(self) -> str:
        """Fetch the rest of the file; the SHA-256 of all of it. Gives up after `patience_s` without a new byte."""
        digest, size = self._hash_what_is_there()
        moved_at, pause, is_link_renewed = time.monotonic(), 0.5, False
        furthest = size
        while size < self._file.bytes:
            problem, wait_s = "", pause
            try:
                with self._http.stream("GET", self._file.find_link(is_link_renewed), headers=_from(size)) as answer:
                    if answer.status_code == 200 and size:
                        # The storage knows no ranges: it begins again.
                        digest, size = hashlib.sha256(), self._begin_again(size)
                    if answer.status_code in (200, 206):
                        size = self._append(answer, digest, size)
                    elif answer.status_code == 416:
                        digest, size = hashlib.sha256(), self._begin_again(size)
                    else:
                        answer.read()
                        wait_s = self._wait_after(answer, pause, is_link_renewed=is_link_renewed)
                        is_link_renewed = answer.status_code in _LINK_IS_OVER
                        problem = f"the file storage answered {answer.status_code}"
            except httpx.TransportError as failure:
                problem = str(failure) or type(failure).__name__
                size = self._part.stat().st_size if self._part.exists() else 0
            if self._stop.is_set():
                raise Stopped
            if size > furthest:
                furthest, moved_at, pause, is_link_renewed = size, time.monotonic(), 0.5, False
            elif time.monotonic() - moved_at > self._patience_s:
                why = problem or "it came without a byte"
                raise AcsError(f"{self._file.name} cannot be downloaded: {why}.", code=CONNECTION_FAILED)
            if size < self._file.bytes:
                self._stop.wait(wait_s)
                pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
        return str(digest.hexdigest())

    def _hash_what_is_there(self) -> tuple[Any, int]:
        digest, size = hashlib.sha256(), 0
        if self._part.exists():
            with self._part.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
        if size > self._file.bytes:
            self._part.unlink()
            return hashlib.sha256(), 0
        self._on_bytes(size)
        return digest, size

    def _append(self, answer: httpx.Response, digest: Any, size: int) -> int:
        """Write what comes behind the `size` bytes that are there; the size then."""
        with self._part.open("ab") as file:
            for chunk in answer.iter_raw():
                room = self._file.bytes - size
                kept = chunk[:room]
                file.write(kept)
                digest.update(kept)
                size += len(kept)
                self._on_bytes(len(kept))
                if self._stop.is_set():
                    raise Stopped
                if len(chunk) >= room:
                    break
        return size

    def _begin_again(self, size: int) -> int:
        self._part.unlink(missing_ok=True)
        self._on_bytes(-size)
        return 0

    def _wait_after(self, answer: httpx.Response, pause: float, *, is_link_renewed: bool) -> float:
        """Seconds until the next try. Raises AcsError where a new link was refused as well."""
        if answer.status_code in _LINK_IS_OVER:
            if is_link_renewed:
                raise error_of(answer)
            return 0.0
        asked = retry_after_seconds(answer.headers.get("Retry-After"))
        return pause if asked is None else min(asked, self._patience_s)


def _from(size: int) -> dict[str, str]:
    # Not compressed on the way: the bytes are counted and hashed as the storage has them.
    return {"Accept-Encoding": "identity"} | ({"Range": f"bytes={size}-"} if size else {})
