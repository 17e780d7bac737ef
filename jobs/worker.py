"""Jobs in an inference worker: taken while there are places, batched by the engine with Completions, ended by rows."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import msgspec
import psycopg
import structlog
from django.conf import settings
from django.db import DatabaseError

from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError
from acsinfra.core.leases import LeaseLostError
from acsinfra.core.shared_folder import FolderNotSharedError, require_shared_folder
from acsinfra.core.storage import StorageError, get_storage
from inference.answers import AnswerBuilder
from inference.engine.errors import EngineDied
from inference.wire import EngineRequest
from inference.worker.background import LentEngine
from inference.worker.completions import fault_of
from inference.worker.whole import make_whole_answer
from jobs import running
from jobs.engine_places import EnginePlaces
from jobs.running import ClaimedJob, Count
from jobs.services import TRIES_AT_MOST, Answer, job_failed

logger = structlog.get_logger(__name__)

# How often an idle worker looks by itself, whatever became of the messages.
TAKE_SECONDS: Final = 2.0
# How often the rows of running Jobs are looked at, for a cancel whose push was lost.
LOOK_SECONDS: Final = 0.5
AWAY_SECONDS: Final = 1.0
# Larger bodies are kept in storage.
INLINE_BYTES: Final = 64 * 1024
# Storage that stays away for longer costs the Job its result.
STORAGE_PATIENCE_SECONDS: Final = 60.0
AWAY: Final = (DatabaseError, psycopg.Error)


class _NeverBegun(Exception):
    """The engine died before this Job had a place in it."""


class Stop(Enum):
    """Why a run stops before its answer is there."""

    CANCELLED = auto()
    LOST = auto()
    WORKER_STOPS = auto()


@dataclass(eq=False)
class _Run:
    """A Job that this worker runs; its time begins with its first place in the engine, by `turn`."""

    job: ClaimedJob
    turn: int
    earlier: "asyncio.Task[None] | None" = None
    task: "asyncio.Task[None] | None" = None
    builder: AnswerBuilder | None = None
    stopped: Stop | None = None
    has_begun: bool = False
    is_ending: bool = False
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    @property
    def tokens(self) -> int | None:
        """Those that went through the model and those it made; None before the engine has the request."""
        return None if self.builder is None else sum(self.builder.counted)

    @property
    def count(self) -> Count:
        """What goes with the lease."""
        return Count(id=self.job.id, owner=self.job.owner, tokens=self.tokens)

    def begin(self) -> None:
        """Note that its task runs; CancelledError where it was stopped before."""
        self.has_begun = True
        if self.stopped is not None:
            raise asyncio.CancelledError

    def stop(self, why: Stop) -> None:
        """Stop in the engine, unless its end is being written: that sees by itself what the row says."""
        if self.stopped is None and not self.is_ending and self.task is not None:
            self.stopped = why
            # A task that is cancelled before its first step never runs: nobody would write the Job's end.
            if self.has_begun:
                self.task.cancel()


class JobRunner:
    """Takes and runs the Jobs of one inference worker's model; lives in the engine's event loop."""

    def __init__(self, engine: LentEngine) -> None:
        self._engine = engine
        self._engine_places = EnginePlaces(engine.sequences_at_once)
        self._turns = itertools.count()
        self._places = min(settings.JOBS_PER_ENGINE, engine.model.max_num_seqs)
        self._runs: dict[str, _Run] = {}
        self._wake = asyncio.Event()
        self._suspects = asyncio.Lock()
        self._is_stopping = False
        self._taking = asyncio.create_task(self._take(), name="jobs-taking")
        self._keeping = asyncio.create_task(self._keep(), name="jobs-keeping")

    def look(self) -> None:
        """There may be a new Job."""
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Stop a Job at once: its row says that it is cancelled."""
        run = self._runs.get(request_id)
        if run is not None:
            run.stop(Stop.CANCELLED)

    def stop_taking(self) -> None:
        """Begin no more Jobs."""
        self._is_stopping = True
        self._wake.set()

    async def finish(self, *, within: float) -> None:
        """Let what runs end for `within` seconds, put back the rest, and return once all is written."""
        self.stop_taking()
        await self._taking
        await self._wait_for_runs(within)
        for run in list(self._runs.values()):
            run.stop(Stop.WORKER_STOPS)
        await self._wait_for_runs(within)
        self._keeping.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeping

    async def _wait_for_runs(self, seconds: float) -> None:
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    # Taking

    async def _take(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            try:
                while self._has_place() and (job := await self._claim()) is not None:
                    self._begin(job)
            except FolderNotSharedError as error:
                logger.error("this worker must not write results, and so takes no Jobs", reason=str(error))
                return
            except (*AWAY, StorageError) as error:
                logger.warning("a part is away; the worker will look for Jobs again", reason=type(error).__name__)
                await asyncio.sleep(AWAY_SECONDS)
            except Exception:
                logger.exception("taking Jobs failed; the worker will look again")
                await asyncio.sleep(AWAY_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(TAKE_SECONDS):
                    await self._wake.wait()

    def _has_place(self) -> bool:
        return not self._is_stopping and len(self._runs) < self._places and self._engine.life.is_serving

    async def _claim(self) -> ClaimedJob | None:
        # An owner for each claim: what an earlier run of the same Job still does here may write nothing.
        owner, model = uuid.uuid4(), self._engine.model

        def claim() -> ClaimedJob | None:
            # Only once the API has taken a Job has it surely said which folder it reads.
            require_shared_folder()
            return running.claim_job(base_model_id=model.pk, owner=owner)

        return await database_step(claim)

    def _begin(self, job: ClaimedJob) -> None:
        earlier = self._runs.get(job.request_id)
        if earlier is not None:
            earlier.stop(Stop.LOST)
        run = self._runs[job.request_id] = _Run(
            job, next(self._turns), earlier=None if earlier is None else earlier.task
        )
        run.task = asyncio.create_task(self._run(run), name=job.request_id)
        logger.info("job claimed", job_id=str(job.id), claims=job.claims)

    # Running

    async def _run(self, run: _Run) -> None:
        with structlog.contextvars.bound_contextvars(job_id=str(run.job.id)):
            try:
                await self._write(await self._outcome(run))
            except LeaseLostError:
                logger.info("the Job was ended or given to another; its run stops")
            except Exception:
                logger.exception("the end of a Job could not be written; its lease runs out")
            finally:
                if self._runs.get(run.job.request_id) is run:
                    del self._runs[run.job.request_id]
                self.look()

    async def _outcome(self, run: _Run) -> Callable[[], object]:
        """Run a Job, and return what writes its end."""
        job, owner = run.job.id, run.job.owner
        # One of the Jobs whose engine died may be what kills it: their last tries are made one after the other, so that
        # it does not take the others with it. Earlier ones run side by side, because most deaths are nobody's fault.
        turn = self._suspects if run.job.tries >= TRIES_AT_MOST - 1 else nullcontext()
        try:
            run.begin()
            async with turn, run.limit:
                body = await self._complete(run)
        except asyncio.CancelledError:
            if run.stopped is None:
                raise
            logger.info("a Job was stopped", why=run.stopped.name)
            if run.stopped is Stop.LOST:
                raise LeaseLostError from None
            # An orderly stop leaves the Job as it was; a cancel charges what was generated.
            tokens = run.tokens if run.stopped is Stop.CANCELLED else None
            return lambda: running.hand_back(job_id=job, owner=owner, tokens=tokens)
        except _NeverBegun:
            return lambda: running.hand_back(job_id=job, owner=owner, tokens=None)
        except EngineDied:
            tokens = run.tokens
            return lambda: running.fail_try(job_id=job, owner=owner, tokens=tokens)
        except Exception as error:  # noqa: BLE001 (each is a result, the unexpected ones too)
            if run.builder is None and isinstance(error, TimeoutError):
                # The engine never came back for it: a Job waits for one.
                return lambda: running.hand_back(job_id=job, owner=owner, tokens=None)
            return self._failure(run, ApiError(*fault_of(error, run.job.request_id)))
        run.is_ending = True
        return await self._success(run, body)

    async def _complete(self, run: _Run) -> bytes:
        limit = settings.ENGINE_TIME_LIMIT.total_seconds()
        loop = asyncio.get_running_loop()
        run.limit.reschedule(loop.time() + limit)
        if run.earlier is not None:
            # The engine knows requests by their ids.
            await asyncio.wait([run.earlier])
        now = time.time()
        work = msgspec.structs.replace(run.job.work, created=int(now), deadline=now + limit)
        engine = await self._engine.life.engine()
        builder = run.builder = AnswerBuilder(work, self._engine.decode)
        # From here on it waits for the Jobs before it, as long as they take.
        run.limit.reschedule(None)

        @asynccontextmanager
        async def place(request: EngineRequest) -> AsyncGenerator[None]:
            async with self._engine_places.taken(request.sampling.n, turn=run.turn):
                if run.limit.when() is None:
                    if engine.is_dead:
                        raise _NeverBegun
                    run.limit.reschedule(loop.time() + limit)
                yield

        try:
            return await make_whole_answer(work, engine, builder, place=place)
        except (EngineDied, _NeverBegun):
            self._engine.life.report_dead(engine)
            raise

    async def _success(self, run: _Run, body: bytes) -> Callable[[], object]:
        tokens = run.tokens or 0
        answer = Answer(status=200, body=body, bytes=len(body))
        if len(body) > INLINE_BYTES:
            try:
                answer = await self._store(run, body)
            except StorageError as error:
                logger.error("a result could not be kept", reason=str(error))
                return self._failure(run, job_failed("The result of this Job could not be kept in the file storage."))
        job, owner = run.job.id, run.job.owner
        return lambda: running.finish_job(job_id=job, owner=owner, tokens=tokens, answer=answer)

    def _failure(self, run: _Run, error: ApiError) -> Callable[[], object]:
        job, owner, tokens = run.job.id, run.job.owner, run.tokens
        return lambda: running.fail_running_job(job_id=job, owner=owner, tokens=tokens, error=error)

    async def _store(self, run: _Run, body: bytes) -> Answer:
        """Keep a large result in storage. Raises StorageError when that stays away, and LeaseLostError."""
        job, owner = run.job.id, run.job.owner
        await self._write(lambda: running.note_files(job_id=job, owner=owner))
        # A place of its own for each claim: a worker that lost its lease without knowing overwrites nothing.
        key = f"{run.job.storage_prefix}/result_{run.job.claims}.json"
        give_up_at = time.monotonic() + STORAGE_PATIENCE_SECONDS
        while True:
            try:
                stored = await asyncio.to_thread(get_storage().write, key, body)
                return Answer(status=200, key=stored.key, bytes=stored.bytes)
            except StorageError as error:
                if time.monotonic() > give_up_at or self._is_stopping:
                    raise
                logger.warning("the storage failed; trying again", reason=str(error))
                await asyncio.sleep(AWAY_SECONDS)

    async def _write(self, write: Callable[[], object]) -> None:
        """Do one transaction, tried again while the database is away: it is refused once the lease is another's."""
        give_up_at = time.monotonic() + settings.ENGINE_TIME_LIMIT.total_seconds()
        while True:
            try:
                await database_step(write)
                return
            except AWAY as error:
                if time.monotonic() > give_up_at:
                    raise
                logger.warning("the database is away; trying again", reason=type(error).__name__)
                await asyncio.sleep(AWAY_SECONDS)

    # Keeping

    async def _keep(self) -> None:
        """Renew the leases of what runs, with its counts, and see what was cancelled or given to another."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            runs = list(self._runs.values())
            if not runs:
                continue
            is_due = time.monotonic() - renewed_at >= settings.LEASE_RENEWAL.total_seconds()
            try:
                counts = [run.count for run in runs]
                states = await database_step(running.look_after_jobs, counts, renew=is_due)
            except AWAY as error:
                logger.warning("the database is away; leases wait for it", reason=type(error).__name__)
                await asyncio.sleep(AWAY_SECONDS)
                continue
            except Exception:
                logger.exception("looking after running Jobs failed; the worker will look again")
                continue
            if is_due:
                renewed_at = time.monotonic()
            for run in runs:
                if run.job.id not in states:
                    run.stop(Stop.LOST)
                elif states[run.job.id]:
                    run.stop(Stop.CANCELLED)
