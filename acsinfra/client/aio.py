"""The client for asyncio: Completions, Jobs and harvests, many at once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import httpx

from acsinfra.client import calls, steps
from acsinfra.client.calls import CompletionOptions, HarvestOptions, Prompt
from acsinfra.client.client import ANSWER_SECONDS, PATIENCE_SECONDS, Client
from acsinfra.client.connection import Call, Server, send_async
from acsinfra.client.models import Budget, Completion, CompletionChunk, CompletionJob, HarvestJob, Model
from acsinfra.client.steps import Steps

if TYPE_CHECKING:
    from acsinfra.client.folder import Harvest

# How long a look at the jobs of a harvest may wait, and so how soon its thread notices that nobody waits for it.
POLL_SECONDS: Final = 3


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
        self._timeout_s = timeout_s
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

    # Completions

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
        return await self._take(steps.complete(prompt, model, steering_vectors, idempotency_key, options))

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
        async with aclosing(answer):
            with calls.stream_breaks_are_told():
                async for line in answer.aiter_lines():
                    if (chunk := calls.chunk_of_line(line)) is not None:
                        yield chunk

    async def models(self) -> list[Model]:
        """The Base models."""
        return await self._take(steps.models())

    async def model(self, model: str) -> Model:
        """One Base model."""
        return await self._take(steps.model(model))

    async def budget(self) -> Budget:
        """The tokens of this month."""
        return await self._take(steps.budget())

    # Jobs

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
        return await self._take(steps.submit_job(prompt, model, steering_vectors, idempotency_key, options))

    async def job(self, job_id: str) -> CompletionJob:
        """A Job as it is now."""
        return await self._take(steps.job(job_id))

    async def jobs(
        self, *, status: str | None = None, model: str | None = None, limit: int = 20
    ) -> list[CompletionJob]:
        """The newest Jobs, at most `limit`."""
        return await self._take(steps.jobs(status, model, limit))

    async def cancel_job(self, job_id: str) -> CompletionJob:
        """Cancel a Job; one that has ended stays as it is."""
        return await self._take(steps.cancel_job(job_id))

    async def job_result(self, job_id: str) -> Completion:
        """The Completion of a Job that has succeeded. Raises the error that its Completion had."""
        return await self._take(steps.job_result(job_id))

    async def wait_for_job(self, job_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for a Job to end; its Completion. Raises its error, or `still_waiting` after `timeout_s`."""
        return await self._take(steps.wait_for_job(job_id, timeout_s))

    # Harvest jobs

    async def submit_harvest(
        self,
        prompts: Sequence[str],
        *,
        model: str,
        idempotency_key: str | None = None,
        **options: Unpack[HarvestOptions],
    ) -> HarvestJob:
        """Submit one Harvest job of at most 4,096 prompts; `harvest` takes corpora of any size."""
        return await self._take(steps.submit_harvest(prompts, model, idempotency_key, options))

    async def harvest_job(self, job_id: str, *, wait_s: int = 0) -> HarvestJob:
        """A Harvest job as it is now, or as soon as its status changes within `wait_s` seconds (at most 60)."""
        return await self._take(steps.harvest_job(job_id, wait_s))

    async def harvest_jobs(
        self, *, status: str | None = None, model: str | None = None, limit: int = 20
    ) -> list[HarvestJob]:
        """The newest Harvest jobs, at most `limit`."""
        return await self._take(steps.harvest_jobs(status, model, limit))

    async def cancel_harvest(self, job_id: str) -> HarvestJob:
        """Cancel a Harvest job; one that has ended stays as it is."""
        return await self._take(steps.cancel_harvest(job_id))

    async def wait_for_harvest(self, job_id: str, *, timeout_s: float | None = None) -> HarvestJob:
        """Wait for a Harvest job to be done. Raises `job_failed`, `job_cancelled`, or `still_waiting`."""
        return await self._take(steps.wait_for_harvest(job_id, timeout_s))

    async def harvest(
        self, prompts: Sequence[str], out: str | Path, *, model: str, **options: Unpack[HarvestOptions]
    ) -> "Harvest":
        """Harvest a corpus of any size into the folder `out`, as `Client.harvest`, in a thread, and open it.

        Cancelled, it submits and downloads nothing more; jobs that were submitted go on, and the same call with them.
        """
        from acsinfra.client.harvesting import HarvestRun

        def run(client: Client, stop: threading.Event) -> None:
            folder = Path(out)
            HarvestRun(client, prompts, folder, model=model, options=options, poll_s=POLL_SECONDS, stop=stop).run()

        return await self._open_after(run, out)

    async def download_harvest(self, job_id: str, out: str | Path) -> "Harvest":
        """Download the files of one done Harvest job into the folder `out`, in a thread, and open it."""
        from acsinfra.client.harvesting import download_job

        return await self._open_after(lambda client, stop: download_job(client, job_id, Path(out), stop=stop), out)

    async def _open_after(self, work: Callable[[Client, threading.Event], None], out: str | Path) -> "Harvest":
        """Write files with a `Client` in a thread, and open their folder. A cancel waits for the thread's end."""
        from acsinfra.client.folder import open_harvest

        stop = threading.Event()

        def in_thread() -> "Harvest":
            server = self._server
            with Client(
                server.base_url, server.api_key, timeout_s=self._timeout_s, patience_s=self.patience_s
            ) as client:
                work(client, stop)
            return open_harvest(out)

        thread = asyncio.ensure_future(asyncio.to_thread(in_thread))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            # Until it has ended, the folder is its own.
            stop.set()
            await asyncio.wait([thread])
            raise

    async def _take[Result](self, taken: Steps[Result]) -> Result:
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
                answer = await send_async(self._http, step, patience_s=self.patience_s)
            else:
                await asyncio.sleep(step)
