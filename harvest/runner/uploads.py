"""A thread that writes shards into storage while the model goes on reading."""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog
from django.db import connections

from acsinfra.core.storage import ObjectWriter, Storage, StoredObject

logger = structlog.get_logger(__name__)

# What may wait for the storage: past this the engine waits too.
BYTES_AT_MOST: Final = 128 * 1024 * 1024
# Of 19: a tenth of the weight of a thread that computes.
UPLOAD_NICENESS: Final = 10
type Step = Callable[[], None]


class ShardUploads:
    """Shards on their way, one after the other, in the order of `begin`, `write` and `end`.

    What failed in the thread is raised by the next call. `waited_s` are the seconds that callers waited for it.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._steps: queue.SimpleQueue[tuple[Step | None, int]] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._fault: BaseException | None = None
        self._is_idle = True
        self._writer: ObjectWriter | None = None
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="shard-uploads", daemon=True)
        self._thread.start()

    def begin(self, key: str, *, expected_bytes: int) -> None:
        """Begin a shard."""

        def step() -> None:
            self._writer = self._storage.open_writer(key, expected_bytes=expected_bytes)

        self._put(step, 0)

    def write(self, data: memoryview | bytes) -> None:
        """Append to the shard that was begun; `data` must not change afterwards. Waits while too much is waiting."""

        def step() -> None:
            assert self._writer is not None, "write follows begin"
            self._writer.write(data)

        self._put(step, len(data) if isinstance(data, bytes) else data.nbytes)

    def end(self, when_whole: Callable[[StoredObject], None]) -> None:
        """Make the shard whole, then call `when_whole` in the thread."""

        def step() -> None:
            assert self._writer is not None, "end follows begin"
            stored = self._writer.close()
            self._writer = None
            when_whole(stored)

        self._put(step, 0)

    def then(self, step: Step) -> None:
        """Call `step` in the thread once all before it is written."""
        self._put(step, 0)

    def check(self) -> None:
        """Raise what failed in the thread, if anything did."""
        self._raise_fault()

    def wait_until_written(self) -> None:
        """Return when all is in storage; raises what failed."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle or self._fault is not None)
        self.waited_s += time.monotonic() - began
        self._raise_fault()

    def close(self) -> None:
        """End the thread; a shard that was not ended is dropped."""
        with self._changed:
            self._fault = self._fault or RuntimeError("the uploads were closed")
            self._changed.notify_all()
        self._steps.put((None, 0))
        self._thread.join()

    def _put(self, step: Step, size: int) -> None:
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._fault is not None or self._waiting_bytes + size <= BYTES_AT_MOST or not self._waiting_bytes
                )
            )
            self.waited_s += time.monotonic() - began
            self._raise_fault()
            self._waiting_bytes += size
            # Together, or the thread could end the step before it in between, and find itself idle.
            self._is_idle = False
            self._steps.put((step, size))

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        _let_others_go_first()
        try:
            while True:
                step, size = self._steps.get()
                if step is None:
                    break
                self._take(step)
                with self._changed:
                    self._waiting_bytes -= size
                    self._is_idle = self._steps.empty()
                    self._changed.notify_all()
        finally:
            if self._writer is not None:
                self._writer.abort()
            connections.close_all()

    def _take(self, step: Step) -> None:
        if self._fault is not None:
            return
        try:
            step()
        except BaseException as error:  # noqa: BLE001 (it is raised again where the run can see it)
            with self._changed:
                self._fault = error


def _let_others_go_first() -> None:
    """Give this thread, and those that it starts, the cores that the model leaves.

    A forward pass on CPUs waits for the slowest of its threads: one that is put aside for an upload holds up them all.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICENESS)
