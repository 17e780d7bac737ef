"""What every test has: a real PostgreSQL and Valkey, and on demand the real processes (see `tests.stack`).

pytest-django reads the settings when pytest is configured, and the settings read the environment. So the servers start
here, at import, before any test module, and any conftest below may import models.

Two processes of pytest-xdist share the tests (`-n 0` runs them in one), each with servers of its own. What shares an
engine goes to the same one.
"""

import atexit
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import django
import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey
from acsinfra.quickstart.supervisor import PROJECT, Supervisor
from tests.stack import Stack

if TYPE_CHECKING:
    from tests.inference.engine.reference import ReferenceModel

# Where bytecode is not kept, each process around an engine compiles vLLM's thousands of modules anew: a minute of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Threads that share the tiny model's matrices wait for each other, spinning: twenty times the CPU for the same product.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HOME = Path(tempfile.mkdtemp(prefix="acs-tests-"))
SUPERVISOR = Supervisor(HOME)
# One import of vLLM for all engines of this process's tests.
Stack.engines_from = SUPERVISOR
POSTGRES = EmbeddedPostgres(SUPERVISOR, durable=False)
VALKEY = EmbeddedValkey(SUPERVISOR)


@atexit.register
def _end_everything() -> None:
    SUPERVISOR.close()
    shutil.rmtree(HOME, ignore_errors=True)


POSTGRES.start()
VALKEY.start()
os.environ.update(
    {
        "DJANGO_SETTINGS_MODULE": "acsinfra.settings",
        "ACSINFRA_HOME": str(HOME),
        "DATABASE_URL": POSTGRES.url,
        "BROKER_URL": VALKEY.url,
        "STORAGE_URL": (HOME / "files").as_uri(),
        "SECRET_KEY": secrets.token_urlsafe(50),
        "ALLOWED_HOSTS": "127.0.0.1,localhost,testserver",
        "ALLOW_PLAIN_HTTP": "true",
        "HF_HUB_OFFLINE": "1",
    }
)
(HOME / "files").mkdir()
django.setup()

# A test never asserts a time; on a busy machine any example may take long.
hypothesis.settings.register_profile("acsinfra", deadline=None)
hypothesis.settings.load_profile("acsinfra")

_running_stack: list[Stack] = []
_FOLDERS_WITH_THE_STACK = {"tests/acsinfra/client", "tests/browser"}
# What takes longest begins first. But the tools run meanwhile, so that one process alone compiles vLLM's modules where
# none of them was imported before.
_FIRST = (
    "tests/inference/engine",
    "tests/test_style.py",
    "the stack",
    "tests/inference/test_completions_faults.py",
    "tests/acsinfra/test_quickstart.py",
    "tests/jobs/test_jobs_faults.py",
    "tests/harvest/test_harvest_faults.py",
    "tests/benchmarks/chaos/test_chaos.py",
)
_STACK_FIXTURES = {"stack", "api", "inference_stack", "harvest_stack"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model in float32."""
    from tests.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> "Iterator[ReferenceModel]":
    """Return the tiny model in HuggingFace, float32."""
    from tests.inference.engine.reference import ReferenceModel

    with ReferenceModel(tiny_model) as model:
        yield model


@pytest.fixture(scope="session")
def stack(tiny_model: Path) -> Iterator[Stack]:
    """Return the real processes over a database of their own; none runs until it is asked for."""
    stack = Stack(SUPERVISOR, postgres=POSTGRES, broker_url=VALKEY.url.removesuffix("/0") + "/1", tiny_model=tiny_model)
    _running_stack.append(stack)
    yield stack
    _running_stack.remove(stack)
    stack.close()


@pytest.fixture(scope="session")
def api(stack: Stack) -> Stack:
    """Return the stack with the API."""
    stack.start("api")
    return stack


@pytest.fixture(scope="session")
def inference_stack(api: Stack) -> Stack:
    """Return the stack with the API and an inference worker of the model `tiny`."""
    api.start("inference")
    return api


@pytest.fixture(scope="session")
def harvest_stack(api: Stack) -> Stack:
    """Return the stack with the API, a runner of the model `tiny` and the scheduler."""
    api.start("runner", "scheduler")
    return api


class _SharedEngines(LoadScopeScheduling):
    """Tests that share an engine run in one process, others by their file; what takes longest begins first."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        listed = (scope for scope in _FIRST if scope in self.workqueue)
        first = next(listed, None) or max(self.workqueue, key=lambda scope: len(self.workqueue[scope]))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@cache
def _scope_of(file: str) -> str:
    """Return what a file's tests run together with."""
    folder = file.rpartition("/")[0]
    if folder == "tests/inference/engine":
        return folder
    if folder in _FOLDERS_WITH_THE_STACK:
        return "the stack"
    # What kills parts has a stack of its own.
    has_the_stack = not file.endswith("_faults.py") and ": Stack" in (PROJECT / file).read_text()
    return "the stack" if has_the_stack else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let each process of pytest-xdist read the settings once it has servers of its own.

    pytest-django reads them before any conftest where it inherits this name: all processes then shared one broker.
    """
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Share the tests between the processes of pytest-xdist."""
    return _SharedEngines(config, log)


def pytest_configure() -> None:
    """Let SIGTERM end a run as Ctrl-C does: fixtures end what they started."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End the servers; a process of pytest-xdist does not get to what `atexit` registers."""
    _end_everything()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the stack's processes logged, where a test of theirs failed."""
    report = yield
    if report.failed and _STACK_FIXTURES & set(getattr(item, "fixturenames", ())):
        for stack in _running_stack:
            report.sections.extend((f"log of {name}", text) for name, text in stack.log_tails().items())
    return report
