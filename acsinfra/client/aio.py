"""The client for asyncio: Completions and Jobs, many at once. Its harvests are the sync client's."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from acsinfra.client import calls
from acsinfra.client.calls import CompletionOptions, Prompt
from acsinfra.client.client import ANSWER_SECONDS, PATIENCE_SECONDS
from acsinfra.client.connection import Call, Server, send_async
from acsinfra.client.errors import CONNECTION_FAILED, STILL_WAITING, AcsError
from acsinfra.client.models import Budget, Completion, CompletionChunk, CompletionJob, Json, Model


class AsyncClient:
    """An ACS Infra server, for asyncio; as `Client` otherwise. `async with AsyncClient() as client: …`."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = ANSWER_SECONDS,
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:
        self._server = Server.of(base_url, api_key)
        self._http = httpx.AsyncClient(**self._server.options(timeout_s))
        self.patience_s = patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._server.base_url!r})"

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        idempotency_key: str | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """Complete a prompt or a list of them, as `Client.complete`."""
        call = calls.completion(model, prompt, options, steering_vectors, idempotency_key=idempotency_key)
        return Completion.from_json(await self._json(call))

    async def stream(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        **options: Unpack[CompletionOptions],
    ) -> AsyncIterator[CompletionChunk]:
        """Complete a prompt, and yield what comes as it comes."""
        call = calls.completion(model, prompt, options, steering_vectors, stream=True)
        answer = await send_async(self._http, call, patience_s=self.patience_s, stream=True)
        try:
            async for line in answer.aiter_lines():
                if (chunk := calls.chunk_of_line(line)) is not None:
                    yield chunk
        except httpx.TransportError as failure:
            raise AcsError(f"The stream broke off: {failure}", code=CONNECTION_FAILED) from failure
        finally:
            await answer.aclose()

    async def models(self) -> list[Model]:
        """The Base models."""
        return [Model.from_json(raw) for raw in (await self._json(calls.get("models")))["data"]]

    async def budget(self) -> Budget:
        """The tokens of this month."""
        return Budget.from_json(await self._json(calls.get("budget")))

    async def submit_job(
        self,
        prompt: Prompt,
        *,
        model: str,
        steering_vectors: Sequence[Mapping[str, Any]] = (),
        idempotency_key: str | None = None,
        **options: Unpack[CompletionOptions],
    ) -> CompletionJob:
        """Have a Completion run on the server, as `Client.submit_job`."""
        key = idempotency_key or f"acs-{uuid.uuid4()}"
        call = calls.completion_job(model, prompt, options, steering_vectors, idempotency_key=key)
        return CompletionJob.from_json(await self._json(call))

    async def job(self, job_id: str) -> CompletionJob:
        """A Job as it is now."""
        return CompletionJob.from_json(await self._json(calls.get(calls.one("completion-jobs", job_id))))

    async def cancel_job(self, job_id: str) -> CompletionJob:
        """Cancel a Job; one that has ended stays as it is."""
        return CompletionJob.from_json(await self._json(calls.post(calls.one("completion-jobs", job_id, "cancel"))))

    async def wait_for_job(self, job_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for a Job to end; its Completion. Raises its error, or `still_waiting` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.1
        while not (job := await self.job(job_id)).is_ended:
            if deadline is not None and time.monotonic() + pause > deadline:
                raise AcsError(f"Job {job_id} is {job.status}.", code=STILL_WAITING, body=job.raw)
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 1.5)
        return Completion.from_json(await self._json(calls.get(calls.one("completion-jobs", job_id, "result"))))

    async def _json(self, call: Call) -> Json:
        answer = await send_async(self._http, call, patience_s=self.patience_s)
        try:
            body: Json = answer.json()
        except ValueError as error:
            raise AcsError("The answer is not JSON.", code="invalid_answer", status=answer.status_code) from error
        return body
