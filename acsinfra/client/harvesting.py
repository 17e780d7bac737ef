"""A harvest of a corpus of any size: submitted as jobs, waited for, downloaded, and gone on with after any stop."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from filelock import FileLock, Timeout

from acsinfra.client import run_state
from acsinfra.client.calls import HarvestOptions
from acsinfra.client.corpus import PROMPTS_AT_MOST, Caps, check_prompt, may_be_split
from acsinfra.client.errors import HARVEST_INCOMPLETE, STILL_WAITING, AcsError, invalid_argument
from acsinfra.client.folder import has_every_file
from acsinfra.client.job_files import Downloads
from acsinfra.client.models import HarvestJob
from acsinfra.client.run_state import Part, RunState
from acsinfra.client.watcher import Watcher

if TYPE_CHECKING:
    from acsinfra.client.client import Client

# Of an Idempotency-Key's 24 hours on the server, what leaves no doubt.
KEY_KEPT_SECONDS: Final = 23 * 3600
# Of the jobs that are not over, the oldest is waited for, and this many in all are looked at.
LOOKED_AT: Final = 8
# A server that restarts, a runner that loads a large model: a harvest outlives both.
PATIENCE_SECONDS: Final = 900.0
RUNNER_PAUSE_SECONDS: Final = 15.0


class HarvestRun:
    """One harvest into one folder. `run` goes on from wherever an earlier one stopped, and charges nothing twice.

    `job_size` bounds the prompts of a job, `n_connections` the downloads at once, `poll_s` how long a look at the jobs
    may wait for a change, `patience_s` how long a server, a runner or a connection may be away. A failed job is
    submitted anew at the next `run`; a cancelled one only with `retry_cancelled`, as it was charged. `resubmit`: send
    again what was sent more than a day ago without an answer. `stop`, once set, ends it within `poll_s`.
    """

    def __init__(
        self,
        client: "Client",
        prompts: Sequence[str],
        out: Path,
        *,
        model: str,
        options: HarvestOptions | Mapping[str, Any],
        watcher: Watcher | None = None,
        job_size: int = PROMPTS_AT_MOST,
        n_connections: int = 8,
        poll_s: int = 20,
        patience_s: float | None = None,
        statistics_only: bool = False,
        retry_cancelled: bool = False,
        resubmit: bool = False,
        stop: threading.Event | None = None,
    ) -> None:
        if isinstance(prompts, str):
            raise invalid_argument("prompts must be a list of texts, not one text.", param="prompts")
        if not prompts:
            raise invalid_argument("There are no prompts.", param="prompts")
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, f"Prompt {index}")
        if not 1 <= job_size <= PROMPTS_AT_MOST:
            raise invalid_argument(f"job_size must be 1 to {PROMPTS_AT_MOST}.", param="job_size")
        self._client = client.patient(max(client.patience_s, PATIENCE_SECONDS if patience_s is None else patience_s))
        self._prompts = prompts
        self._out = out
        self._model = model
        self._options = options
        self._watcher = watcher or Watcher()
        room = len(json.dumps(dict(options)))
        self._caps = Caps(prompts=job_size, body_bytes=Caps().body_bytes - room)
        self._n_connections = n_connections
        self._poll_s = poll_s
        self._statistics_only = statistics_only
        self._retry_cancelled = retry_cancelled
        self._resubmit = resubmit
        self._stop = stop or threading.Event()
        self._submit_at = 0.0
        self._refusal: AcsError | None = None
        self._without_runner_since: float | None = None
        self._faults: list[AcsError] = []
        self._begun: set[int] = set()

    def run(self) -> RunState:
        """Submit, wait, download; the state at the end. Raises AcsError; what was done until then stays."""
        self._out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._out / ".harvest.lock", timeout=0):
                return self._run()
        except Timeout:
            raise invalid_argument(f"Another process harvests into {self._out}.", param="out") from None

    def _run(self) -> RunState:
        self._state = run_state.begin_or_continue(
            self._out, self._prompts, model=self._model, options=self._options, caps=self._caps
        )
        for part in self._state.parts:
            if part.is_downloaded and not has_every_file(self._out / part.folder_name):
                part.is_downloaded = False
            if part.status == "failed" or (part.status == "cancelled" and self._retry_cancelled):
                part.begin_again()
        self._watcher.planned(self._state)
        with Downloads(self._client, self._watcher, self._n_connections) as downloads:
            while True:
                require_not_stopped(self._stop)
                self._submit_what_fits()
                self._begin_downloads(downloads)
                if not self._has_work(downloads):
                    break
                self._look_at_jobs()
                self._begin_downloads(downloads)
                self._note_downloads(downloads)
        self._require_whole()
        return self._state

    def _has_work(self, downloads: Downloads) -> bool:
        may_submit = self._refusal is None and bool(self._parts(None))
        return may_submit or any(part.is_waited_for for part in self._state.parts) or downloads.is_busy

    def _parts(self, status: str | None) -> list[Part]:
        return [part for part in self._state.parts if part.status == status and not part.is_downloaded]

    def _save(self) -> None:
        run_state.save_state(self._out, self._state)

    # Submitting

    def _submit_what_fits(self) -> None:
        """Submit parts until the server has as many unfinished jobs of this key as it takes."""
        while self._refusal is None and time.monotonic() >= self._submit_at and (waiting := self._parts(None)):
            part = waiting[0]
            try:
                self._submit(part)
            except AcsError as error:
                self._after_refusal(part, error)

    def _submit(self, part: Part) -> None:
        if not self._resubmit:
            run_state.require_fresh_submit(part, kept_s=KEY_KEPT_SECONDS)
        run_state.mark_submitted(part)
        self._save()
        job = self._client.submit_harvest(
            self._prompts[part.first : part.first + part.n_prompts],
            model=self._model,
            idempotency_key=part.idempotency_key,
            **cast("HarvestOptions", self._options),
        )
        part.job_id = job.id
        self._without_runner_since = None
        self._note(part, job)

    def _after_refusal(self, part: Part, error: AcsError) -> None:
        """Decide what a refused submit means. Raises nothing: jobs that run are waited for first."""
        if error.code == "harvest_concurrency_exceeded":
            part.submitted_at = None
            self._submit_at = time.monotonic() + (error.retry_after or 30.0)
            if not any(other.is_waited_for for other in self._state.parts):
                self._watcher.said("This key's other Harvest jobs come first; waiting for a place.")
        elif may_be_split(error) and part.n_prompts > 1:
            self._state.split(part)
            self._watcher.planned(self._state)
        elif error.code == "harvest_unavailable" and self._may_wait_for_a_runner():
            # Its job has ended, with 0 tokens.
            part.begin_again()
            self._submit_at = time.monotonic() + RUNNER_PAUSE_SECONDS
            self._watcher.said(f"No runner of {self._model} is there; waiting for one.")
        else:
            if error.code == "harvest_unavailable":
                part.begin_again()
            elif error.body and error.status is not None and error.status < 500:
                part.submitted_at = None
            # Else the server may have taken it: the same key will tell.
            self._refusal = error
        self._save()

    def _may_wait_for_a_runner(self) -> bool:
        now = time.monotonic()
        if self._without_runner_since is None:
            self._without_runner_since = now
        return now - self._without_runner_since < self._client.patience_s

    # Waiting

    def _look_at_jobs(self) -> None:
        """Wait up to `poll_s` for the oldest job's status to change, and look at those behind it."""
        unfinished = [part for part in self._state.parts if part.is_waited_for][:LOOKED_AT]
        for number, part in enumerate(unfinished):
            wait_s = 0 if number else self._poll_s
            self._note(part, self._client.harvest_job(cast("str", part.job_id), wait_s=wait_s))
            if not part.is_waited_for:
                self._submit_at = 0.0
        if not unfinished and self._refusal is None and self._parts(None):
            time.sleep(min(self._poll_s, max(0.0, self._submit_at - time.monotonic())))

    def _note(self, part: Part, job: HarvestJob) -> None:
        changed = (part.status, part.tokens) != (job.status, job.tokens)
        part.status, part.tokens, part.error = job.status, job.tokens, job.error
        part.reserved_tokens = job.reserved_tokens
        if changed:
            self._save()
        self._watcher.job_changed(part, job)

    # Downloading

    def _begin_downloads(self, downloads: Downloads) -> None:
        """Begin to download every job that is done: seen so by a look, a submit sent again, or an earlier run."""
        for part in self._parts("done"):
            if part.first in self._begun:
                continue
            self._begun.add(part.first)
            folder = self._out / part.folder_name
            try:
                downloads.begin(cast("str", part.job_id), folder, statistics_only=self._statistics_only, part=part)
            except AcsError as error:
                # The other parts' files are not to be missed for it.
                self._faults.append(error)

    def _note_downloads(self, downloads: Downloads) -> None:
        """Note the parts whose files have all come. With nothing else to wait for, wait for one."""
        is_idle = not any(part.is_waited_for for part in self._state.parts) and (
            self._refusal is not None or not self._parts(None)
        )
        for part, error in downloads.finished(wait_s=1.0 if is_idle else 0.0):
            if error is not None:
                self._faults.append(error)
                continue
            # With the statistics alone it is not whole: without that option, the next run brings the rest.
            part.is_downloaded = not self._statistics_only
            self._save()

    def _require_whole(self) -> None:
        for error in (self._refusal, *self._faults):
            if error is not None:
                raise error
        ended = [part for part in self._state.parts if part.status in ("failed", "cancelled")]
        if ended:
            words = "; ".join(f"job {part.job_id}: {part.error or part.status}" for part in ended[:3])
            raise AcsError(
                f"{len(ended)} of {len(self._state.parts)} jobs did not end well: {words}",
                code=HARVEST_INCOMPLETE if len(ended) < len(self._state.parts) else f"job_{ended[0].status}",
            )


def download_job(
    client: "Client", job_id: str, out: Path, *, watcher: Watcher | None = None, stop: threading.Event | None = None
) -> None:
    """Download the files of one done job into `out`; what is there already is not fetched again. Raises AcsError."""
    out.mkdir(parents=True, exist_ok=True)
    with Downloads(client, watcher or Watcher(), 8) as downloads:
        downloads.begin(job_id, out, statistics_only=False, part=Part(0, 0, ""))
        while downloads.is_busy:
            require_not_stopped(stop)
            for _, error in downloads.finished(wait_s=1.0):
                if error is not None:
                    raise error


def require_not_stopped(stop: threading.Event | None) -> None:
    """Raise AcsError (`still_waiting`) once nobody waits for a harvest any more."""
    if stop is not None and stop.is_set():
        raise AcsError("The harvest was stopped; the same call goes on with it.", code=STILL_WAITING)
