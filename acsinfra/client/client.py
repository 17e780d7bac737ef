"""The client that waits for each answer."""

import copy
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from acsinfra.client import calls
from acsinfra.client.calls import CompletionOptions, HarvestOptions, Prompt
from acsinfra.client.connection import Call, Server, send
from acsinfra.client.errors import CONNECTION_FAILED, STILL_WAITING, AcsError
from acsinfra.client.models import (
    Budget,
    Completion,
    CompletionChunk,
    CompletionJob,
    HarvestJob,
    Json,
    Model,
)

if TYPE_CHECKING:
    from acsinfra.client.folder import Harvest

# The server gives up after 540 s; what comes later never comes.
ANSWER_SECONDS = 600.0
PATIENCE_SECONDS = 60.0
LONGPOLL_HEADER = "X-Acs-Longpoll"


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
        call = calls.completion(model, prompt, options, steering_vectors, idempotency_key=idempotency_key)
        return Completion.from_json(self._json(call))

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
        try:
            for line in answer.iter_lines():
                if (chunk := calls.chunk_of_line(line)) is not None:
                    yield chunk
        except httpx.TransportError as failure:
            raise AcsError(f"The stream broke off: {failure}", code=CONNECTION_FAILED) from failure
        finally:
            answer.close()

    def models(self) -> list[Model]:
        """The Base models."""
        return [Model.from_json(raw) for raw in self._json(calls.get("models"))["data"]]

    def model(self, model: str) -> Model:
        """One Base model."""
        return Model.from_json(self._json(calls.get(calls.one("models", model))))

    def budget(self) -> Budget:
        """The tokens of this month: the limit, used, held and what is left."""
        return Budget.from_json(self._json(calls.get("budget")))

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
        key = idempotency_key or f"acs-{uuid.uuid4()}"
        call = calls.completion_job(model, prompt, options, steering_vectors, idempotency_key=key)
        return CompletionJob.from_json(self._json(call))

    def job(self, job_id: str) -> CompletionJob:
        """A Job as it is now."""
        return CompletionJob.from_json(self._json(calls.get(calls.one("completion-jobs", job_id))))

    def jobs(self, *, status: str | None = None, model: str | None = None, limit: int = 20) -> list[CompletionJob]:
        """The newest Jobs, at most `limit`."""
        return list(map(CompletionJob.from_json, self._list("completion-jobs", "id", limit, status, model)))

    def cancel_job(self, job_id: str) -> CompletionJob:
        """Cancel a Job; one that has ended stays as it is."""
        return CompletionJob.from_json(self._json(calls.post(calls.one("completion-jobs", job_id, "cancel"))))

    def job_result(self, job_id: str) -> Completion:
        """The Completion of a Job that has succeeded. Raises the error that its Completion had."""
        answer = self._send(calls.get(calls.one("completion-jobs", job_id, "result")))
        if answer.status_code == 202:
            raise AcsError(f"Job {job_id} has not ended.", code=STILL_WAITING, status=202, body=answer.json())
        return Completion.from_json(answer.json())

    def wait_for_job(self, job_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for a Job to end; its Completion. Raises its error, or `still_waiting` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.1
        while not (job := self.job(job_id)).is_ended:
            if deadline is not None and time.monotonic() + pause > deadline:
                raise AcsError(f"Job {job_id} is {job.status}.", code=STILL_WAITING, body=job.raw)
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)
        return self.job_result(job_id)

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
        key = idempotency_key or f"acs-{uuid.uuid4()}"
        return HarvestJob.from_json(self._json(calls.harvest(model, prompts, options, idempotency_key=key)))

    def harvest_job(self, job_id: str, *, wait_s: int = 0) -> HarvestJob:
        """A Harvest job as it is now, or as soon as its status changes within `wait_s` seconds (at most 60)."""
        wait = min(calls.WAIT_AT_MOST_SECONDS, wait_s) or None
        answer = self._send(calls.get(calls.one("harvest", job_id), wait=wait))
        job = HarvestJob.from_json(answer.json())
        if answer.headers.get(LONGPOLL_HEADER) == "declined" and not job.is_ended:
            # Too many of this key wait already: wait here, so that a loop of calls does not spin.
            time.sleep(min(wait_s, float(answer.headers.get("Retry-After", 3))))
        return job

    def harvest_jobs(self, *, status: str | None = None, model: str | None = None, limit: int = 20) -> list[HarvestJob]:
        """The newest Harvest jobs, at most `limit`."""
        return list(map(HarvestJob.from_json, self._list("harvest", "job_id", limit, status, model)))

    def cancel_harvest(self, job_id: str) -> HarvestJob:
        """Cancel a Harvest job; one that has ended stays as it is."""
        return HarvestJob.from_json(self._json(calls.post(calls.one("harvest", job_id, "cancel"))))

    def wait_for_harvest(self, job_id: str, *, timeout_s: float | None = None) -> HarvestJob:
        """Wait for a Harvest job to be done. Raises `job_failed`, `job_cancelled`, or `still_waiting`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = calls.WAIT_AT_MOST_SECONDS if deadline is None else deadline - time.monotonic()
            job = self.harvest_job(job_id, wait_s=max(0, min(calls.WAIT_AT_MOST_SECONDS, round(left))))
            if job.is_ended:
                calls.require_success(job)
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise AcsError(f"Harvest job {job_id} is {job.status}.", code=STILL_WAITING, body=job.raw)

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

    # How it is sent

    def _send(self, call: Call) -> httpx.Response:
        return send(self._http, call, patience_s=self.patience_s)

    def _json(self, call: Call) -> Json:
        answer = self._send(call)
        try:
            body: Json = answer.json()
        except ValueError as error:
            raise AcsError("The answer is not JSON.", code="invalid_answer", status=answer.status_code) from error
        return body

    def _list(self, path: str, id_key: str, limit: int, status: str | None, model: str | None) -> list[Json]:
        found: list[Json] = []
        while len(found) < limit:
            after = found[-1][id_key] if found else None
            size = min(100, limit - len(found))
            page = self._json(calls.get(path, limit=size, after=after, status=status, model=model))
            found += page["data"]
            if not page["has_more"] or not page["data"]:
                break
        return found
