"""Shards reach the storage in order, faults reach the run, and a slow storage slows the engine."""

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acsinfra.core.storage import FolderStorage, ObjectWriter, StorageUnavailableError, StoredObject
from harvest.runner import uploads
from harvest.runner.uploads import ShardUploads


class SlowStorage(FolderStorage):
    """A folder that opens no writer before it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def open_writer(self, key: str, *, expected_bytes: int = 0) -> ObjectWriter:
        self.gate.wait(30)
        return super().open_writer(key, expected_bytes=expected_bytes)


def test_shards_are_whole_in_order(tmp_path: Path) -> None:
    storage, stored = FolderStorage(tmp_path), list[StoredObject]()
    up = ShardUploads(storage)
    for number in range(3):
        up.begin(f"run/{number}", expected_bytes=6)
        up.write(b"abc")
        up.write(memoryview(bytes([number]) * 3))
        up.end(stored.append)
    up.wait_until_written()
    up.close()
    assert [one.key for one in stored] == ["run/0", "run/1", "run/2"]
    for number, one in enumerate(stored):
        content = b"abc" + bytes([number]) * 3
        assert storage.read(one.key) == content
        assert one.sha256 == hashlib.sha256(content).hexdigest()


def test_a_fault_of_the_storage_reaches_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    up = ShardUploads(FolderStorage(tmp_path / "file"))
    up.begin("run/0", expected_bytes=1)
    with pytest.raises(StorageUnavailableError):
        up.wait_until_written()
    with pytest.raises(StorageUnavailableError):
        up.write(b"x")
    up.close()


def test_a_slow_storage_makes_the_engine_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BYTES_AT_MOST", 1_000)
    storage = SlowStorage(tmp_path)
    up = ShardUploads(storage)
    up.begin("run/0", expected_bytes=1_500)
    up.write(bytes(900))
    began = time.monotonic()
    threading.Timer(0.5, storage.gate.set).start()
    up.write(bytes(600))
    assert time.monotonic() - began >= 0.4
    up.end(lambda _: None)
    up.wait_until_written()
    assert up.waited_s >= 0.4
    up.close()
    assert storage.size("run/0") == 1_500


def test_a_run_that_stops_leaves_no_half_shard(tmp_path: Path) -> None:
    up = ShardUploads(FolderStorage(tmp_path))
    up.begin("run/0", expected_bytes=3)
    up.write(b"ab")
    up.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_model_goes_before_the_uploads_and_what_they_start(tmp_path: Path) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, seen = niceness(), list[int]()
    up = ShardUploads(FolderStorage(tmp_path))
    up.then(lambda: seen.append(niceness()))
    with ThreadPoolExecutor(1) as parts:
        up.then(lambda: seen.append(parts.submit(niceness).result()))
        up.wait_until_written()
    up.close()
    assert seen == [uploads.UPLOAD_NICENESS] * 2
    assert niceness() == before < uploads.UPLOAD_NICENESS
