"""Where files are kept: a folder or an S3 bucket, chosen by `STORAGE_URL`.

Objects are named by keys (`harvest/<run id>/shard_00000.safetensors`), written once and whole: a reader sees all of an
object or none of it. Writers take bytes as they come, hash them on the way and never keep a copy on disk beside the
object. Links work without an API key until they expire.
"""

import errno
import functools
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import parse_qs, unquote, urlsplit

from django.conf import settings

from acsinfra.core.file_links import folder_link

READ_CHUNK_BYTES = 1024 * 1024
MARKER_NAME = ".acsinfra-storage"
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)


class StorageError(Exception):
    """The storage did not do what was asked; the text is one sentence without a path or a secret."""


class StorageUnavailableError(StorageError):
    """The storage is away, full or refusing for now: trying again later may help."""


class ObjectNotFoundError(StorageError):
    """No whole object has this key."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A whole object: its key, its length in bytes and the SHA-256 (hex) of its bytes."""

    key: str
    bytes: int
    sha256: str


class ObjectWriter(Protocol):
    """An object on its way. `close` makes it whole, `abort` leaves nothing; leaving the `with` block open aborts.

    Every method may raise `StorageError`. After one did, only `abort` makes sense.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which may be reused once this returns."""

    def close(self) -> StoredObject:
        """Make the object whole and visible under its key, in place of any older one."""

    def abort(self) -> None:
        """Drop what was written. Never raises; harmless after `close`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """A place for objects. Thread-safe; every method blocks and may raise `StorageError`."""

    def open_writer(self, key: str, *, expected_bytes: int = 0) -> ObjectWriter:
        """Begin an object. `expected_bytes` only sizes the parts of a large upload."""

    def write(self, key: str, data: bytes) -> StoredObject:
        """Write a small object at once."""

    def read(self, key: str) -> bytes:
        """All bytes of an object."""

    def read_range(self, key: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes `[start, stop)` of an object in chunks of at most 1 MiB."""

    def size(self, key: str) -> int | None:
        """Length in bytes, or None when no whole object has this key."""

    def keys(self, prefix: str) -> list[str]:
        """The keys of the whole objects below `prefix/`, sorted."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete all below `prefix/`, unfinished objects too. Deleting nothing is fine."""

    def discard_unfinished(self, prefix: str) -> None:
        """Drop what a killed writer left unfinished below `prefix/`."""

    def link(self, key: str, *, expires_at: datetime, base_url: str) -> str:
        """A URL that reads the object without an API key until `expires_at`.

        `base_url` is the API's own address, for storages that the API serves.
        """

    def check(self) -> None:
        """Raise `StorageError` unless the storage answers."""


def get_storage() -> Storage:
    """The storage that `STORAGE_URL` names; one object for a process."""
    return storage_from_url(settings.STORAGE_URL)


@functools.lru_cache(maxsize=8)
def storage_from_url(url: str) -> Storage:
    """`file:///folder`, or `s3://bucket/prefix?endpoint=https://host&region=name&public_endpoint=https://host`.

    Raises ValueError with a sentence for an address that is neither.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path and not parts.netloc:
        return FolderStorage(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from acsinfra.core.storage_s3 import S3Storage

        options = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
        unknown = options.keys() - {"endpoint", "region", "public_endpoint"}
        if unknown:
            raise ValueError(f"STORAGE_URL has an unknown option: {', '.join(sorted(unknown))}.")
        return S3Storage(bucket=parts.netloc, prefix=parts.path.strip("/"), **options)
    raise ValueError("STORAGE_URL must be file:///folder or s3://bucket/prefix?endpoint=…&region=….")


def checked_key(key: str) -> str:
    """`key` itself; ValueError for one that could leave its place or hide (`..`, a leading dot or slash)."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a storage key: {key!r}")
    return key


class FolderStorage:
    """Objects as files below one folder, for processes that share its host or a network file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open_writer(self, key: str, *, expected_bytes: int = 0) -> ObjectWriter:
        """Begin a file under another name; `close` renames it."""
        with _storage_errors("write to"):
            return _FolderWriter(self._path(key), key)

    def write(self, key: str, data: bytes) -> StoredObject:
        """Write a small file at once."""
        with self.open_writer(key) as writer:
            writer.write(data)
            return writer.close()

    def read(self, key: str) -> bytes:
        """All bytes of a file."""
        with _storage_errors("read from"):
            return self._path(key).read_bytes()

    def read_range(self, key: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes `[start, stop)` in chunks."""
        with _storage_errors("read from"), self._path(key).open("rb") as file:
            file.seek(start)
            left = None if stop is None else stop - start
            while chunk := file.read(READ_CHUNK_BYTES if left is None else min(READ_CHUNK_BYTES, left)):
                left = None if left is None else left - len(chunk)
                yield chunk

    def size(self, key: str) -> int | None:
        """The file's length, or None."""
        with _storage_errors("read from"):
            path = self._path(key)
            try:
                return path.stat().st_size if path.is_file() else None
            except FileNotFoundError:
                return None

    def keys(self, prefix: str) -> list[str]:
        """The keys below `prefix/`."""
        with _storage_errors("read from"):
            files = (path for path in self._path(prefix).rglob("*") if path.is_file())
            keys = (path.relative_to(self.root).as_posix() for path in files)
            return sorted(key for key in keys if _KEY.fullmatch(key))

    def delete_prefix(self, prefix: str) -> None:
        """Remove the folder of `prefix`."""
        with _storage_errors("delete from"), suppress(FileNotFoundError):
            shutil.rmtree(self._path(prefix))

    def discard_unfinished(self, prefix: str) -> None:
        """Remove the files that were never renamed."""
        with _storage_errors("delete from"):
            for path in self._path(prefix).rglob(f".*{_FolderWriter.SUFFIX}"):
                path.unlink(missing_ok=True)

    def link(self, key: str, *, expires_at: datetime, base_url: str) -> str:
        """A link that Django signed and serves (`acsinfra.core.file_links`)."""
        return folder_link(checked_key(key), expires_at=expires_at, base_url=base_url)

    def check(self) -> None:
        """Raise unless the folder can be written to; makes it where it is missing."""
        with _storage_errors("write to"):
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError

    def marker(self) -> str | None:
        """What tells this folder from another host's of the same name; None before `make_marker`."""
        with _storage_errors("read from"):
            try:
                return (self.root / MARKER_NAME).read_text(encoding="ascii").strip() or None
            except FileNotFoundError:
                return None

    def make_marker(self) -> str:
        """Give the folder its marker, unless it has one; the first of several at once wins."""
        self.check()
        with _storage_errors("write to"):
            fresh = self.root / f"{MARKER_NAME}.{uuid.uuid4().hex}"
            fresh.write_text(str(uuid.uuid4()), encoding="ascii")
            try:
                with suppress(FileExistsError):
                    os.link(fresh, self.root / MARKER_NAME)
            finally:
                fresh.unlink()
            return (self.root / MARKER_NAME).read_text(encoding="ascii").strip()

    def path_to_serve(self, key: str) -> Path:
        """The file behind a link; ValueError for a key that is none."""
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)


class _FolderWriter:
    """A file under a hidden name beside its place, renamed when whole."""

    SUFFIX = ".partial"

    def __init__(self, path: Path, key: str) -> None:
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync_folder(folder.parent)
        self._path, self._key = path, key
        self._partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{self.SUFFIX}")
        self._file = self._partial.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        with _storage_errors("write to"):
            while view:
                written = self._file.write(view)
                self._bytes += written
                view = view[written:]

    def close(self) -> StoredObject:
        with _storage_errors("write to"):
            # A manifest says that its shards are there: they must be, also after the power went.
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self._path)
            _sync_folder(self._path.parent)
        self._is_closed = True
        return StoredObject(key=self._key, bytes=self._bytes, sha256=self._hash.hexdigest())

    def abort(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _sync_folder(folder: Path) -> None:
    """Have the disk know the names in `folder`: a file's own sync says nothing about them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such thing: their servers see to it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(doing: str) -> Iterator[None]:
    """Turn the file system's errors into ours, keeping its reason but not its path."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFoundError("The storage has no such object.") from error
    except OSError as error:
        reason = error.strerror or "permission denied"
        raise StorageUnavailableError(f"Could not {doing} the storage folder: {reason}.") from error
