"""When a request is sent again, and after how long: decided here for the sync and the async client alike."""

import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import httpx

from acsinfra.client.errors import CONNECTION_FAILED, AcsError, error_of

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
# The request never left: it may be sent again whatever it asks for.
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# What waiting does not mend within a client's patience, or what the caller has to decide.
_NEVER_AGAIN: Final = frozenset({"model_unavailable", "harvest_unavailable", "harvest_concurrency_exceeded"})


@dataclass
class Retries:
    """The retries of one request: at most `patience_s` seconds of them.

    `is_repeatable`: sent twice, the work is done once (a GET, or a POST with an Idempotency-Key). A request that is not
    is sent again only where it was refused before any work, or never left.
    """

    is_repeatable: bool
    patience_s: float
    never_codes: Collection[str] = _NEVER_AGAIN
    _tries: int = 0
    _began_at: float = field(default_factory=time.monotonic)

    def pause_after_failure(self, failure: httpx.TransportError, base_url: str) -> float:
        """Seconds until the next try. Raises AcsError (`connection_failed`) when there is none."""
        may_repeat = self.is_repeatable or isinstance(failure, _NOT_SENT)
        pause = self._backoff()
        if not may_repeat or not self._has_time_for(pause):
            what = str(failure) or type(failure).__name__
            raise AcsError(f"No answer from {base_url}: {what}", code=CONNECTION_FAILED) from failure
        return pause

    def pause_after_answer(self, answer: httpx.Response) -> float:
        """Seconds until the next try of a request whose answer, which has been read, is an error. Raises that error."""
        error = error_of(answer)
        pause = error.retry_after if error.retry_after is not None else self._backoff()
        if not self._is_worth_another_try(error) or not self._has_time_for(pause):
            raise error
        return pause

    def _is_worth_another_try(self, error: AcsError) -> bool:
        # With `request_id` beside it, it is how a Job's Completion ended, and will always be.
        if not error.should_retry or error.code in self.never_codes or "request_id" in error.body:
            return False
        if error.status in (429, 503) or error.code == "idempotency_in_progress":
            return True
        # Of the API's own 5xx an Idempotency-Key would only bring the same again; a proxy's page says nothing of it.
        return self.is_repeatable and (error.status or 0) >= 500 and not error.body

    def _backoff(self) -> float:
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._tries)
        self._tries += 1
        # Spread, so that clients that failed together do not come back together.
        return float(pause * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)

    def _has_time_for(self, pause: float) -> bool:
        return time.monotonic() - self._began_at + pause <= self.patience_s
