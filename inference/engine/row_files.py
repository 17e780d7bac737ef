"""How captured rows, and marks of failure, come out of a worker: one file on tmpfs for each request.

The front makes the file and maps its header; each worker rank maps the header too, says there that it took the
request up, and rank 0 writes rows at their absolute positions. A header page, then [tokens, layers, hidden] in the
model's dtype. Rows are written with `pwrite` and not through a mapping: a full tmpfs is then an `OSError` for one
request, where a mapping would end the process with SIGBUS.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import uuid
from collections.abc import Buffer, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import torch

_MAGIC = b"ACSROWS1"
_HEADER_BYTES = 4096
_ROWS_DONE_AT = 8
_FAULT_LENGTH_AT = 16
_ROW_BYTES_AT = 24
_RANKS_AT = 64
_FAULT_AT = 1024
_MAX_RANKS = _FAULT_AT - _RANKS_AT
_COUNT = struct.Struct("<Q")
_PREFIX = "acsinfra-rows"


def _directory() -> Path:
    shared_memory = Path("/dev/shm")  # noqa: S108 - tmpfs by definition; files in it are made with O_EXCL, mode 0600
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


class RowFile:
    """The front's end of one request's file. Make it with `RowShelf.make`, and always `close` it."""

    def __init__(self, path: Path, *, row_bytes: int) -> None:
        """Create `path`, which must not exist, readable by this user alone.

        Raises `OSError` when there is no room even for its header.
        """
        self.path = path
        self._row_bytes = row_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            header = bytearray(_HEADER_BYTES)
            header[: len(_MAGIC)] = _MAGIC
            _COUNT.pack_into(header, _ROW_BYTES_AT, row_bytes)
            os.pwrite(self._descriptor, header, 0)
            self._header = mmap.mmap(self._descriptor, _HEADER_BYTES)
        except BaseException:
            os.close(self._descriptor)
            path.unlink()
            raise

    def is_taken_up_by(self, ranks: frozenset[int]) -> bool:
        """Say whether every one of these worker ranks has read and accepted the request's options."""
        return all(self._header[_RANKS_AT + rank] for rank in ranks)

    @property
    def fault(self) -> str | None:
        """What went wrong with this request in a worker, or None."""
        (length,) = _COUNT.unpack_from(self._header, _FAULT_LENGTH_AT)
        return self._header[_FAULT_AT : _FAULT_AT + length].decode(errors="replace") if length else None

    @property
    def rows_done(self) -> int:
        """How many rows, from position 0 on and without a gap, the worker has written."""
        (rows,) = _COUNT.unpack_from(self._header, _ROWS_DONE_AT)
        return int(rows)

    def read(self, *, rows: int, layers: int, columns: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Copy the first `rows` rows out as [layers, rows, columns]. Ask `rows_done` first."""
        if rows * self._row_bytes == 0:
            return np.empty((layers, rows, columns), dtype)
        with mmap.mmap(self._descriptor, _HEADER_BYTES + rows * self._row_bytes, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, dtype, count=rows * layers * columns, offset=_HEADER_BYTES)
            array = view.reshape(rows, layers, columns).transpose(1, 0, 2).copy()
            del view
        return array

    def close(self) -> None:
        """Remove the file. Its memory is free once the workers have dropped the request too."""
        self._header.close()
        os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class RowShelf:
    """Where one engine's row files are, named so that the next start finds what a crash left."""

    def __init__(self, engine_name: str) -> None:
        """Name the files by `engine_name` and this process."""
        self._directory = _directory()
        safe = "".join(c if c.isalnum() else "_" for c in engine_name)[:80]
        self._engine_prefix = f"{_PREFIX}-{safe}-"
        own = psutil.Process()
        self._own_prefix = f"{self._engine_prefix}{own.pid}-{own.create_time()}-"

    def sweep(self) -> int:
        """Remove the files of this engine name whose process is gone; return how many there were."""
        removed = 0
        for path in self._directory.glob(f"{self._engine_prefix}*"):
            owner = path.name.removeprefix(self._engine_prefix).split("-")
            if len(owner) != 3 or _is_alive(owner[0], owner[1]):
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed += 1
        return removed

    def make(self, *, row_bytes: int) -> RowFile:
        """Create a fresh file with rows of `row_bytes` bytes; 0 for a request that captures nothing."""
        return RowFile(self._directory / f"{self._own_prefix}{uuid.uuid4().hex}", row_bytes=row_bytes)

    def list_own(self) -> list[Path]:
        """The files that this process holds at present."""
        return sorted(self._directory.glob(f"{self._own_prefix}*"))


def _is_alive(pid: str, create_time: str) -> bool:
    try:
        return psutil.Process(int(pid)).create_time() == float(create_time)
    except (ValueError, psutil.NoSuchProcess):
        return False


class RowWriter:
    """A worker rank's end of one request's file."""

    def __init__(self, path: str) -> None:
        """Open and map a file that the front made; raises `OSError` or `ValueError` when it is not such a file."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._header = mmap.mmap(self._descriptor, _HEADER_BYTES)
            if self._header[: len(_MAGIC)] != _MAGIC:
                raise ValueError("not a row file")
            (self.row_bytes,) = _COUNT.unpack_from(self._header, _ROW_BYTES_AT)
        except BaseException:
            os.close(self._descriptor)
            raise

    def take_up(self, rank: int) -> None:
        """Say that this rank acts on the request."""
        if not 0 <= rank < _MAX_RANKS:
            raise ValueError(f"rank {rank} is past the {_MAX_RANKS} that a row file has room for")
        self._header[_RANKS_AT + rank] = 1

    def write(self, offset: int, content: Buffer) -> None:
        """Write bytes at `offset` bytes into the rows; raises `OSError` when tmpfs is full."""
        view = memoryview(content).cast("B")
        while view:
            written = os.pwrite(self._descriptor, view, _HEADER_BYTES + offset)
            view = view[written:]
            offset += written

    def write_rows(self, position: int, columns: Sequence[int], rows: torch.Tensor) -> None:
        """Write `rows` [count, len(columns), values] of the layers at `columns`, of all that the file has room for.

        They are those of the positions from `position` on.
        """
        content = rows.contiguous().view(torch.uint8).numpy()
        start = position * self.row_bytes
        if content[:1].nbytes == self.row_bytes:
            self.write(start, content)
            return
        column = columns[0] * content[0, 0].nbytes
        for index in range(len(rows)):
            self.write(start + index * self.row_bytes + column, content[index])

    def set_rows_done(self, rows: int) -> None:
        """Say that the rows of positions 0 to `rows` - 1 are there."""
        _COUNT.pack_into(self._header, _ROWS_DONE_AT, rows)

    def mark_fault(self, message: str) -> None:
        """Mark the request as failed; the first mark stays."""
        (length,) = _COUNT.unpack_from(self._header, _FAULT_LENGTH_AT)
        if length:
            return
        encoded = message.encode(errors="replace")[: _HEADER_BYTES - _FAULT_AT] or b"unknown"
        self._header[_FAULT_AT : _FAULT_AT + len(encoded)] = encoded
        _COUNT.pack_into(self._header, _FAULT_LENGTH_AT, len(encoded))

    def close(self) -> None:
        """Unmap and close the file; the front removes it."""
        self._header.close()
        os.close(self._descriptor)
