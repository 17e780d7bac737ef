"""A runner's process: it claims the Harvest jobs of one model, one after the other, on an engine that stays loaded."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog
from django.conf import settings
from django.db import DatabaseError, connections

from acsinfra.core.leases import LeaseLostError, claim_next
from acsinfra.core.shared_folder import FolderNotSharedError, require_shared_folder
from acsinfra.core.storage import StorageError, get_storage
from budgets.spend import may_start_work
from harvest import services
from harvest.models import HarvestJob
from harvest.runner.lease_keeper import LeaseKeeper
from harvest.runner.lives import ENGINE_FAILED, RunnerLife
from harvest.runner.retries import write_patiently
from harvest.runner.splitting import try_prompts
from harvest.runner.stopwatch import Stopwatch
from harvest.runner.windows import WindowMemory
from inference.engine.errors import EngineDied, EngineRefused, RequestFault
from inference.engine.importing import without_collections
from inference.engine.leftovers import end_leftovers, forget_engine_processes, record_engine_processes
from inference.engine.trial import TrialStopped
from inference.models import BaseModel, Engine
from inference.services import engine_options, heartbeat, leave_engine, mark_live, register_engine

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine

logger = structlog.get_logger(__name__)

ENGINE_STATE: Final = settings.HOME / "engines"
_NOT_LOADED: Final = "The model could not be loaded."
_COULD_NOT_READ: Final = "The model could not read {prompt} of this job."


class Runner:
    """Runs the jobs of `model` (with its `files`) in the thread that calls `run_waiting_jobs`.

    What an operator changes of the model meanwhile acts at the next start, as the engine is loaded once.
    `is_stopping` says that the process was told to end: the job that runs is handed back. `end_process` ends it with
    an engine that failed; the process that follows in this `life` sees to the job.
    """

    def __init__(
        self,
        *,
        model: BaseModel,
        checkpoint: str,
        is_stopping: Callable[[], bool],
        end_process: Callable[[], None],
        life: RunnerLife,
    ) -> None:
        self._model, self._is_stopping, self._end_process = model, is_stopping, end_process
        self._options = engine_options(model=model, checkpoint=checkpoint)
        self._name = f"runner-{model.name}"
        self._engine: HarvestEngine | None = None
        self._memory = WindowMemory(settings.HARVEST_MEMORY_BYTES)
        self._is_compiling_refused = False
        self._life, self._owner = life, life.owner
        self._worked_at = time.monotonic()

    def prepare(self) -> None:
        """End what a killed runner left, and make sure of the storage. Raises FolderNotSharedError, StorageError."""
        ended = end_leftovers(ENGINE_STATE, engine_name=self._name)
        if ended:
            logger.warning("an earlier engine was left running; it was ended", pids=ended)
        get_storage().check()
        require_shared_folder()

    def run_waiting_jobs(self) -> None:
        """Claim and run jobs until none waits or the runner is to stop. Never raises: the next look tries again.

        An engine that has had no job for `settings.RUNNER_IDLE` is freed.
        """
        try:
            if self._life.has_died:
                self._see_to_the_last_job()
            while not self._is_stopping() and self._run_next():
                pass
            if self._engine is not None and time.monotonic() - self._worked_at > settings.RUNNER_IDLE.total_seconds():
                logger.info("the engine has been idle; it is freed")
                self._drop_engine()
        except FolderNotSharedError as error:
            logger.error("this runner must not write files", reason=str(error))
            os.kill(os.getpid(), signal.SIGTERM)
        except (DatabaseError, StorageError) as error:
            logger.warning("a part is away; the runner will look again", reason=type(error).__name__)
        finally:
            connections.close_all()

    def shut_down(self) -> None:
        """Free the engine."""
        self._drop_engine()
        forget_engine_processes(ENGINE_STATE, engine_name=self._name)

    def _run_next(self) -> bool:
        if not may_start_work():
            return False
        job_id = claim_next(HarvestJob, base_model_id=self._model.pk, owner=self._owner, lease=settings.LEASE)
        if job_id is None:
            return False
        job = HarvestJob.objects.get(pk=job_id)
        with structlog.contextvars.bound_contextvars(job_id=str(job.pk)):
            logger.info("harvest claimed", claims=job.claims, n_prompts=job.n_prompts)
            self._bring_to_an_end(job, self._run)
        return True

    def _see_to_the_last_job(self) -> None:
        """Find out whether a prompt ended the process before this one, and count a try of the job that it ran."""
        status = HarvestJob.Status.RUNNING
        job = HarvestJob.objects.filter(base_model=self._model, status=status, lease_owner=self._owner).first()
        if job is not None:
            with structlog.contextvars.bound_contextvars(job_id=str(job.pk)):
                self._bring_to_an_end(job, self._try_suspects)
        self._life.has_died = False

    def _bring_to_an_end(self, job: HarvestJob, work: Callable[[HarvestJob, LeaseKeeper], None]) -> None:
        """Do `work` on a leased job, to one of the job's ends or until it is put back. Raises DatabaseError."""
        keeper = LeaseKeeper(job_id=job.pk, owner=self._owner, is_stopping=self._is_stopping)
        try:
            work(job, keeper)
        except LeaseLostError:
            logger.info("the job was cancelled or given to another; its run stops")
        finally:
            keeper.end()
            self._worked_at = time.monotonic()

    def _run(self, job: HarvestJob, keeper: LeaseKeeper) -> None:
        """Run a claimed job to one of its ends, or put it back. Raises LeaseLostError, DatabaseError."""
        watch = Stopwatch()
        with watch.measure("load_s"), without_collections():
            # torch and vllm: seconds, at the first job.
            from harvest.runner.run import HarvestRun, RunStopped

        self._life.in_flight.clear()
        try:
            # Only now has the API surely said which folder it writes to.
            require_shared_folder()
            HarvestRun(
                job=job,
                owner=self._owner,
                model=self._model,
                storage=get_storage(),
                get_engine=self._loaded_engine,
                keeper=keeper,
                watch=watch,
                memory=self._memory,
                in_flight=self._life.in_flight,
            ).run()
        except RunStopped:
            self._hand_back(job)
            logger.info("harvest handed back")
        except FolderNotSharedError:
            self._hand_back(job)
            raise
        except StorageError as error:
            logger.warning("the storage failed; the job waits for it", reason=str(error))
            self._hand_back(job, because_storage_is_away=True)
        except RequestFault as error:
            logger.warning("a prompt failed", reason=str(error))
            self._fail_try(job, _sentence_about_prompt(error))
        except EngineRefused:
            logger.exception("the engine could not be loaded")
            self._fail_try(job, _NOT_LOADED)
        except EngineDied:
            # A GPU's fault spoils the whole process: no engine would load in it again.
            logger.exception("the engine died; this process ends with it")
            self._end_process()
        except (LeaseLostError, DatabaseError):
            raise
        except Exception:
            logger.exception("the run failed")
            self._fail_try(job, "The runner failed while it ran this job.")

    def _try_suspects(self, job: HarvestJob, keeper: LeaseKeeper) -> None:
        """End a job one of whose prompts ends an engine that reads it alone; one without such a prompt is put back."""
        suspects = self._life.in_flight.indexes()
        logger.warning("the runner died; the prompts that its engine held are read apart", prompts=suspects)
        try:
            failing = try_prompts(
                job,
                self._model,
                self._options,
                suspects=suspects,
                name=f"{self._name}-trial",
                should_stop=keeper.should_stop,
            )
        except TrialStopped:
            self._hand_back(job)
        except EngineRefused:
            logger.exception("no engine could be loaded to read prompts apart")
            self._fail_try(job, _NOT_LOADED)
        else:
            if failing is None:
                self._fail_try(job, services.RUNNER_STOPPED)
            else:
                logger.warning("a prompt makes the engine fail", prompt=failing)
                self._fail_try(job, _COULD_NOT_READ.format(prompt=f"prompt {failing}"), is_last=True)

    def _fail_try(self, job: HarvestJob, error: str, *, is_last: bool = False) -> None:
        write_patiently(lambda: services.fail_try(job_id=job.pk, owner=self._owner, error=error, is_last=is_last))

    def _hand_back(self, job: HarvestJob, *, because_storage_is_away: bool = False) -> None:
        write_patiently(
            lambda: services.hand_back(
                job_id=job.pk, owner=self._owner, because_storage_is_away=because_storage_is_away
            )
        )

    def _loaded_engine(self, tokens: int) -> "HarvestEngine":
        """The engine, loaded at the first job; compiled once a job of `tokens` is worth it. Raises EngineRefused."""
        is_worth_compiling = 0 < settings.HARVEST_COMPILE_TOKENS <= tokens and self._may_compile()
        if self._engine is not None and is_worth_compiling and not self._engine.is_compiled:
            self._drop_engine()
        if self._engine is None:
            self._engine = self._start_engine(is_compiled=is_worth_compiling)
            record_engine_processes(ENGINE_STATE, engine_name=self._name, pids=_children())
        return self._engine

    def _may_compile(self) -> bool:
        from inference.engine.arguments import can_compile

        return not self._is_compiling_refused and can_compile(self._options)

    def _start_engine(self, *, is_compiled: bool) -> "HarvestEngine":
        from inference.engine.harvest import HarvestEngine

        if is_compiled:
            try:
                return HarvestEngine.start(self._options, name=self._name, is_compiled=True)
            except EngineRefused:
                self._is_compiling_refused = True
                logger.exception("the compiled model is not served; the model runs as it is")
        return HarvestEngine.start(self._options, name=self._name)

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        self._memory.release()
        if engine is not None:
            try:
                engine.shutdown()
            except Exception:
                logger.exception("the engine did not shut down; its processes are ended at the next start")
            del engine
            _return_memory()


class RunnerRegistration:
    """The runner's Engine row: live from the start, since a job is what loads its engine; a thread sends heartbeats."""

    def __init__(self, *, model: BaseModel, pid: int, on_removed: Callable[[], None]) -> None:
        self.engine = register_engine(model=model, kind=Engine.Kind.RUNNER, pid=pid)
        mark_live(engine=self.engine)
        self._on_removed = on_removed
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Take the row away."""
        if not self._left.is_set():
            self._left.set()
            self._thread.join()
            try:
                leave_engine(engine=self.engine)
            except DatabaseError as error:
                logger.warning("the runner's row could not be taken away; it falls silent", reason=type(error).__name__)

    def _run(self) -> None:
        while not self._left.wait(settings.HEARTBEAT.total_seconds()):
            try:
                if not heartbeat(engine=self.engine):
                    self._on_removed()
                    return
            except DatabaseError as error:
                logger.warning("a heartbeat could not be written", reason=type(error).__name__)
            finally:
                connections.close_all()


_runner: Runner | None = None


def run(*, model: BaseModel, checkpoint: str, life: RunnerLife) -> int:
    """Run the jobs of `model` until a SIGTERM or SIGINT; returns the process's exit code."""
    global _runner
    from harvest.runner.celery_worker import is_told_to_stop, run_celery_worker

    def stop_process() -> None:
        logger.error("the model was removed; its runner ends")
        os.kill(os.getpid(), signal.SIGTERM)

    def end_process() -> None:
        registration.leave()
        os._exit(ENGINE_FAILED)

    _runner = Runner(
        model=model, checkpoint=checkpoint, is_stopping=is_told_to_stop, end_process=end_process, life=life
    )
    try:
        _runner.prepare()
    except StorageError as error:
        logger.error("the runner cannot start", reason=str(error))
        return 1
    registration = RunnerRegistration(model=model, pid=life.pid, on_removed=stop_process)
    try:
        run_celery_worker(registration)
    finally:
        registration.leave()
        _runner.shut_down()
    return 0


def running_runner() -> Runner:
    """The runner of this process."""
    assert _runner is not None, "this task belongs to `manage.py runner`"
    return _runner


def _return_memory() -> None:
    """Give the memory of what is garbage back to the system."""
    gc.collect()
    # What glibc keeps of small pieces for later; other C libraries have no such function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def _sentence_about_prompt(error: RequestFault) -> str:
    """What the User may read of a fault: its prompt, not the engine's own words, which may hold paths."""
    words = str(error).split(":", 1)[0]
    if words.startswith("prompt ") and words.removeprefix("prompt ").isdigit():
        return _COULD_NOT_READ.format(prompt=words)
    return _COULD_NOT_READ.format(prompt="a prompt")
