"""What the methods of both clients do, without sending or waiting: `Client` and `AsyncClient` only take the steps.

Each function is a generator of steps. It yields a `Call` and is sent its answer, or yields a number of seconds to let
pass; what it returns is the method's result. They raise AcsError.
"""

import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import httpx

from acsinfra.client import calls
from acsinfra.client.calls import CompletionOptions, HarvestOptions, Prompt
from acsinfra.client.connection import Call
from acsinfra.client.errors import INVALID_ANSWER, STILL_WAITING, AcsError
from acsinfra.client.models import Budget, Completion, CompletionJob, HarvestJob, Json, Model

LONGPOLL_HEADER = "X-Acs-Longpoll"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0

type Steps[Result] = Generator[Call | float, Any, Result]
type Vectors = Sequence[Mapping[str, Any]]


def complete(
    prompt: Prompt, model: str, vectors: Vectors, idempotency_key: str | None, options: CompletionOptions
) -> Steps[Completion]:
    """A Completion."""
    call = calls.completion(model, prompt, options, vectors, idempotency_key=idempotency_key)
    return Completion.from_json((yield from _json(call)))


def models() -> Steps[list[Model]]:
    """The Base models."""
    return [Model.from_json(raw) for raw in (yield from _json(calls.get("models")))["data"]]


def model(name: str) -> Steps[Model]:
    """One Base model."""
    return Model.from_json((yield from _json(calls.get(calls.one("models", name)))))


def budget() -> Steps[Budget]:
    """The tokens of this month."""
    return Budget.from_json((yield from _json(calls.get("budget"))))


def submit_job(
    prompt: Prompt, model: str, vectors: Vectors, idempotency_key: str | None, options: CompletionOptions
) -> Steps[CompletionJob]:
    """A new Job, or the one that this key made."""
    key = idempotency_key or f"acs-{uuid.uuid4()}"
    call = calls.completion_job(model, prompt, options, vectors, idempotency_key=key)
    return CompletionJob.from_json((yield from _json(call)))


def job(job_id: str) -> Steps[CompletionJob]:
    """A Job as it is now."""
    return CompletionJob.from_json((yield from _json(calls.get(calls.one("completion-jobs", job_id)))))


def jobs(status: str | None, model: str | None, limit: int) -> Steps[list[CompletionJob]]:
    """The newest Jobs."""
    return list(map(CompletionJob.from_json, (yield from _list("completion-jobs", "id", status, model, limit))))


def cancel_job(job_id: str) -> Steps[CompletionJob]:
    """A Job, cancelled if it had not ended."""
    return CompletionJob.from_json((yield from _json(calls.post(calls.one("completion-jobs", job_id, "cancel")))))


def job_result(job_id: str) -> Steps[Completion]:
    """The Completion of a Job. Raises its error, or `still_waiting`."""
    answer = yield from _answer(calls.get(calls.one("completion-jobs", job_id, "result")))
    if answer.status_code == 202:
        raise AcsError(f"Job {job_id} has not ended.", code=STILL_WAITING, status=202, body=_read_json(answer))
    return Completion.from_json(_read_json(answer))


def wait_for_job(job_id: str, timeout_s: float | None) -> Steps[Completion]:
    """The Completion of a Job once it has ended. Raises its error, or `still_waiting` after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_SECONDS
    while not (found := (yield from job(job_id))).is_ended:
        if deadline is not None and time.monotonic() + pause > deadline:
            raise AcsError(f"Job {job_id} is {found.status}.", code=STILL_WAITING, body=found.raw)
        yield pause
        pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
    return (yield from job_result(job_id))


def submit_harvest(
    prompts: Sequence[str], model: str, idempotency_key: str | None, options: HarvestOptions
) -> Steps[HarvestJob]:
    """A new Harvest job, or the one that this key made."""
    key = idempotency_key or f"acs-{uuid.uuid4()}"
    return HarvestJob.from_json((yield from _json(calls.harvest(model, prompts, options, idempotency_key=key))))


def harvest_job(job_id: str, wait_s: int = 0) -> Steps[HarvestJob]:
    """A Harvest job as it is now, or as soon as its status changes within `wait_s` seconds (at most 60)."""
    wait = min(calls.WAIT_AT_MOST_SECONDS, wait_s) or None
    answer = yield from _answer(calls.get(calls.one("harvest", job_id), wait=wait))
    found = HarvestJob.from_json(_read_json(answer))
    if answer.headers.get(LONGPOLL_HEADER) == "declined" and not found.is_ended:
        # Too many of this key wait already: wait here, so that a loop of calls does not spin.
        yield min(wait_s, float(answer.headers.get("Retry-After", 3)))
    return found


def harvest_jobs(status: str | None, model: str | None, limit: int) -> Steps[list[HarvestJob]]:
    """The newest Harvest jobs."""
    return list(map(HarvestJob.from_json, (yield from _list("harvest", "job_id", status, model, limit))))


def cancel_harvest(job_id: str) -> Steps[HarvestJob]:
    """A Harvest job, cancelled if it had not ended."""
    return HarvestJob.from_json((yield from _json(calls.post(calls.one("harvest", job_id, "cancel")))))


def wait_for_harvest(job_id: str, timeout_s: float | None) -> Steps[HarvestJob]:
    """A Harvest job once it is done. Raises `job_failed`, `job_cancelled`, or `still_waiting` after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = calls.WAIT_AT_MOST_SECONDS if deadline is None else deadline - time.monotonic()
        found = yield from harvest_job(job_id, max(0, min(calls.WAIT_AT_MOST_SECONDS, round(left))))
        if found.is_ended:
            calls.require_success(found)
            return found
        if deadline is not None and time.monotonic() >= deadline:
            raise AcsError(f"Harvest job {job_id} is {found.status}.", code=STILL_WAITING, body=found.raw)


def _answer(call: Call) -> Steps[httpx.Response]:
    answer: httpx.Response = yield call
    return answer


def _json(call: Call) -> Steps[Json]:
    return _read_json((yield from _answer(call)))


def _read_json(answer: httpx.Response) -> Json:
    try:
        body: Json = answer.json()
    except ValueError as error:
        raise AcsError("The answer is not JSON.", code=INVALID_ANSWER, status=answer.status_code) from error
    return body


def _list(path: str, id_key: str, status: str | None, model: str | None, limit: int) -> Steps[list[Json]]:
    found: list[Json] = []
    while len(found) < limit:
        after = found[-1][id_key] if found else None
        size = min(100, limit - len(found))
        page = yield from _json(calls.get(path, limit=size, after=after, status=status, model=model))
        found += page["data"]
        if not page["has_more"] or not page["data"]:
            break
    return found
