"""The client that waits for each answer."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from acsinfra.client import calls, steps
from acsinfra.client.calls import CompletionOptions, HarvestOptions, Prompt
from acsinfra.client.connection import Call, Server, send
from acsinfra.client.models import Budget, Completion, CompletionChunk, CompletionJob, HarvestJob, Model
from acsinfra.client.steps import Steps

if TYPE_CHECKING:
    from acsinfra.client.folder import Harvest

# The server gives up after 540 s; what comes later never comes.
ANSWER_SECONDS = 600.0
PATIENCE_SECONDS = 60.0


class Client:
    """An ACS Infra server, for scripts and notebooks. Every method raises AcsError for what did not work.

    `base_url` and `api_key` are read from `ACS_BASE_URL` and `ACS_API_KEY` where they are not given. A request that may
    be sent twice (or was refused before any work: 429, 503) is sent again after what the server asks for or a growing
    pause, for `patience_s` seconds in all. `timeout_s` bounds the wait for any part of an answer. Threads may share it.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = ANSWER_SECONDS,
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:
        self._server = Server.of(base_url, api_key)
        self._http = httpx.Client(**self._server.options(timeout_s))
        self.patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._server.base_url!r})"

    def patient(self, patience_s: float) -> "Client":
        """This client with another patience, over the same connections."""
        other = copy.copy(self)
        other.patience_s = patience_s
        return other

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    # Completions

    def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        idempotency_key: str | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """Complete a prompt or a list of them; `options` are the fields of `POST /v1/completions`.

        With an `idempotency_key` the server does the work once however often it is asked, and to its end also when this
        process goes away; without one, a lost connection is an error, as the work may have been done.
        """
        return self._take(steps.complete(prompt, model, steering_vectors, idempotency_key, options))

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        **options: Unpack[CompletionOptions],
    ) -> Iterator[CompletionChunk]:
        """Complete a prompt, and yield what comes as it comes; closing the iterator stops the work on the server."""
        call = calls.completion(model, prompt, options, steering_vectors, stream=True)
        answer = send(self._http, call, patience_s=self.patience_s, stream=True)
        with closing(answer), calls.stream_breaks_are_told():
            for line in answer.iter_lines():
                if (chunk := calls.chunk_of_line(line)) is not None:
                    yield chunk

    def models(self) -> list[Model]:
        """The Base models."""
        return self._take(steps.models())

    def model(self, model: str) -> Model:
        """One Base model."""
        return self._take(steps.model(model))

    def budget(self) -> Budget:
        """The tokens of this month: the limit, used, held and what is left."""
        return self._take(steps.budget())

    # Jobs

    def submit_job(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        idempotency_key: str | None = None,
        **options: Unpack[CompletionOptions],
    ) -> CompletionJob:
        """Have a Completion run on the server. The same `idempotency_key` is the same Job; none makes a new one."""
        return self._take(steps.submit_job(prompt, model, steering_vectors, idempotency_key, options))

    def job(self, job_id: str) -> CompletionJob:
        """A Job as it is now."""
        return self._take(steps.job(job_id))

    def jobs(self, *, status: str | None = None, model: str | None = None, limit: int = 20) -> list[CompletionJob]:
        """The newest Jobs, at most `limit`."""
        return self._take(steps.jobs(status, model, limit))

    def cancel_job(self, job_id: str) -> CompletionJob:
        """Cancel a Job; one that has ended stays as it is."""
        return self._take(steps.cancel_job(job_id))

    def job_result(self, job_id: str) -> Completion:
        """The Completion of a Job that has succeeded. Raises the error that its Completion had."""
        return self._take(steps.job_result(job_id))

    def wait_for_job(self, job_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for a Job to end; its Completion. Raises its error, or `still_waiting` after `timeout_s`."""
        return self._take(steps.wait_for_job(job_id, timeout_s))

    # Harvest jobs

    def submit_harvest(
        self,
        prompts: Sequence[str],
        *,
        model: str,
        idempotency_key: str | None = None,
        **options: Unpack[HarvestOptions],
    ) -> HarvestJob:
        """Submit one Harvest job of at most 4,096 prompts; `harvest` takes corpora of any size."""
        return self._take(steps.submit_harvest(prompts, model, idempotency_key, options))

    def harvest_job(self, job_id: str, *, wait_s: int = 0) -> HarvestJob:
        """A Harvest job as it is now, or as soon as its status changes within `wait_s` seconds (at most 60)."""
        return self._take(steps.harvest_job(job_id, wait_s))

    def harvest_jobs(self, *, status: str | None = None, model: str | None = None, limit: int = 20) -> list[HarvestJob]:
        """The newest Harvest jobs, at most `limit`."""
        return self._take(steps.harvest_jobs(status, model, limit))

    def cancel_harvest(self, job_id: str) -> HarvestJob:
        """Cancel a Harvest job; one that has ended stays as it is."""
        return self._take(steps.cancel_harvest(job_id))

    def wait_for_harvest(self, job_id: str, *, timeout_s: float | None = None) -> HarvestJob:
        """Wait for a Harvest job to be done. Raises `job_failed`, `job_cancelled`, or `still_waiting`."""
        return self._take(steps.wait_for_harvest(job_id, timeout_s))

    def harvest(
        self, prompts: Sequence[str], out: str | Path, *, model: str, **options: Unpack[HarvestOptions]
    ) -> "Harvest":
        """Harvest a corpus of any size into the folder `out`, and open it.

        It is split into jobs; a call with the same prompts, folder and options goes on where an interrupted one
        stopped, and nothing is charged twice. Raises AcsError.
        """
        from acsinfra.client.folder import open_harvest
        from acsinfra.client.harvesting import HarvestRun

        HarvestRun(self, prompts, Path(out), model=model, options=options).run()
        return open_harvest(out)

    def download_harvest(self, job_id: str, out: str | Path) -> "Harvest":
        """Download the files of one done Harvest job into the folder `out`, and open it."""
        from acsinfra.client.folder import open_harvest
        from acsinfra.client.harvesting import download_job

        download_job(self, job_id, Path(out))
        return open_harvest(out)

    def _take[Result](self, taken: Steps[Result]) -> Result:
        """Send the calls and wait the pauses of a method."""
        answer = None
        while True:
            try:
                step = taken.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
            answer = None
            if isinstance(step, Call):
                answer = send(self._http, step, patience_s=self.patience_s)
            else:
                time.sleep(step)
