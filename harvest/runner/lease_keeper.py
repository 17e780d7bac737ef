"""Keeps a job's lease while its run goes on, and sees that it should stop."""

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from django.conf import settings
from django.db import DatabaseError, connections

from acsinfra.core.leases import LeaseLostError, renew_lease, require_lease
from harvest import services
from harvest.models import HarvestJob

logger = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.4
PROGRESS_SECONDS: Final = 2.0
# A run that does not stop by itself this long after the runner was told to (it loads a model, say) loses its job.
STOP_PATIENCE_SECONDS: Final = 5.0


@dataclass
class Progress:
    """How far a run is."""

    prompts: int = 0
    tokens: int = 0
    bytes_written: int = 0


class LeaseKeeper:
    """A thread beside one run: renews the lease, writes progress, and notices a cancel within a second.

    `is_lost` becomes True when the job was cancelled or given to another, or when the database was away for so long
    that it may have been. `is_stopping` says whether the runner is to stop. The run counts in `progress`.
    """

    def __init__(self, *, job_id: uuid.UUID, owner: uuid.UUID, is_stopping: Callable[[], bool]) -> None:
        self._job_id, self._owner = job_id, owner
        self.progress = Progress()
        self._is_stopping = is_stopping
        self._stopping_since: float | None = None
        self._ended = threading.Event()
        self.is_lost = False
        # The lease was given by the claim, a moment ago.
        self._renewed_at = time.monotonic()
        self._written: tuple[int, int, int] = (0, 0, 0)
        self._written_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def should_stop(self) -> bool:
        """Whether the run should stop at its next step."""
        return self.is_lost or self._is_stopping()

    def end(self) -> None:
        """Stop renewing; the run is over."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self.is_lost and not self._ended.wait(LOOK_SECONDS):
                try:
                    self._look()
                except LeaseLostError:
                    self.is_lost = True
                except DatabaseError as error:
                    # The pool gives a fresh connection at the next look.
                    connections.close_all()
                    logger.warning("the database is away from a runner", reason=type(error).__name__)
                if time.monotonic() - self._renewed_at > 0.9 * settings.LEASE.total_seconds():
                    self.is_lost = True
        finally:
            # Whatever ended it: a lease that nobody renews is another's soon.
            self.is_lost = self.is_lost or not self._ended.is_set()
            connections.close_all()

    def _look(self) -> None:
        now = time.monotonic()
        self._hand_back_if_stuck(now)
        if now - self._renewed_at >= settings.LEASE_RENEWAL.total_seconds():
            renew_lease(HarvestJob, pk=self._job_id, owner=self._owner, lease=settings.LEASE)
            self._renewed_at = now
        reached = (self.progress.prompts, self.progress.tokens, self.progress.bytes_written)
        if reached != self._written and now - self._written_at >= PROGRESS_SECONDS:
            prompts, tokens, written = self._written = reached
            self._written_at = now
            services.record_progress(
                job_id=self._job_id, owner=self._owner, prompts=prompts, tokens=tokens, bytes_written=written
            )
        else:
            require_lease(HarvestJob, pk=self._job_id, owner=self._owner)

    def _hand_back_if_stuck(self, now: float) -> None:
        if not self._is_stopping():
            return
        self._stopping_since = self._stopping_since or now
        if now - self._stopping_since >= STOP_PATIENCE_SECONDS:
            services.hand_back(job_id=self._job_id, owner=self._owner)
            raise LeaseLostError
