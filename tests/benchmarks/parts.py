"""What `bench api` starts: the stack on durable servers, a client, an engine of its own. And what CPU each uses."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import redis
from django.conf import settings

from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey, free_port
from acsinfra.quickstart.supervisor import PROJECT, ChildFailed, Supervisor
from tests.benchmarks.direct_engine import DirectLoad
from tests.benchmarks.figures import Outcome
from tests.benchmarks.http_load import Load
from tests.benchmarks.plain_way.names import QUEUE, READY
from tests.benchmarks.plain_way.tables import make_tables
from tests.stack import Stack, StackUser

SAMPLE_SECONDS = 0.02
# Two engines load side by side, perhaps on a busy machine.
START_SECONDS = 600
LOG_TAIL_BYTES = 4_000


class BenchFailed(Exception):
    """A part failed; the message has what it said."""


class Helper:
    """A process of the benchmark's own that answers a line of JSON with a line of JSON. It ends with its input."""

    def __init__(self, name: str, *command: str, env: Mapping[str, str], logs: Path) -> None:
        self._name = name
        self._log = logs / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=PROJECT,
                env={key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, question: msgspec.Struct) -> Outcome:
        """Return its answer; raises BenchFailed."""
        with contextlib.suppress(BrokenPipeError):
            print(msgspec.json.encode(question).decode(), file=_pipe(self._process.stdin), flush=True)
        return msgspec.convert(self.hear(), Outcome)

    def hear(self) -> dict[str, Any]:
        """Return what it says next; raises BenchFailed."""
        line = _pipe(self._process.stdout).readline()
        if not line:
            tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise BenchFailed(f"{self._name} ended by itself:\n{tail}")
        said: dict[str, Any] = msgspec.json.decode(line)
        if "error" in said:
            raise BenchFailed(f"{self._name}: {said['error']}")
        return said

    def close(self) -> None:
        """End it."""
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


class Parts:
    """Everything under measurement, in a temporary folder; `close` ends all of it.

    `source` is what `addmodel` takes, with its `dtype`, or None for the tiny model in float32.
    """

    def __init__(self, *, source: str | None, dtype: str, max_num_seqs: int) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="acs-bench-"))
        self._closing = contextlib.ExitStack()
        self._closing.callback(shutil.rmtree, self._home, ignore_errors=True)
        try:
            self._start(source, dtype, max_num_seqs)
        except BaseException:
            self.close()
            raise

    def _start(self, source: str | None, dtype: str, max_num_seqs: int) -> None:
        supervisor = self._supervisor = Supervisor(self._home)
        self._closing.callback(supervisor.close)
        if source is None:
            source, dtype = str(make_tiny_model_in(self._home)), "float32"
        postgres, self._valkey = EmbeddedPostgres(supervisor), EmbeddedValkey(supervisor)
        postgres.start()
        self._valkey.start()
        os.environ |= {
            "MODELS_CACHE": str(settings.MODELS_CACHE),
            "SECRET_KEY": secrets.token_urlsafe(50),
            "ALLOWED_HOSTS": "127.0.0.1",
            "ALLOW_PLAIN_HTTP": "true",
        }
        self.model_options = ("--source", source, "--dtype", dtype, "--max-num-seqs", str(max_num_seqs))
        self.stack = Stack(
            supervisor,
            postgres=postgres,
            broker_url=self._valkey.url,
            tiny_model=self._home / "tiny",
            name="bench",
            model_options=self.model_options,
        )
        self._closing.callback(self.stack.close)
        self.stack.start_seconds = START_SECONDS
        self.client = self._helper("client", "tests.benchmarks.http_load")
        self.engine = self._helper("engine", "tests.benchmarks.direct_engine", "tiny")
        self.stack.start("api", "inference", "scheduler")
        self.engine.hear()

    def start_plain_way(self) -> int:
        """Start a plain way, with one more engine; returns the port of its API."""
        broker_url = self._valkey.url.removesuffix("/0") + "/7"
        env = self.stack.env | {"BROKER_URL": broker_url, "PLAIN_WAY_MODEL": "tiny"}
        module, port = "tests.benchmarks.plain_way", free_port()
        make_tables(env["DATABASE_URL"])
        worker = ["celery", "-A", f"{module}.worker", "worker", "-P", "threads", "-c", "64", "-Q", QUEUE]
        worker += ["--without-mingle", "--without-gossip"]
        api = ["uvicorn", f"{module}.api:application", "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
        for name, command in (("plain-worker", worker), ("plain-api", [*api, "--no-access-log"])):
            self._supervisor.spawn(name, [sys.executable, "-m", *command], env=env, cwd=PROJECT)
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(broker_url) as broker:
            while not broker.exists(READY):
                self._supervisor.check()
                if time.monotonic() > deadline:
                    raise BenchFailed("The engine of a plain way did not start.")
                time.sleep(0.1)
        return port

    def _helper(self, name: str, *command: str) -> Helper:
        helper = Helper(name, *command, env=self.stack.env, logs=self._supervisor.logs)
        self._closing.callback(helper.close)
        return helper

    def close(self) -> None:
        """End every part and delete their data."""
        self._closing.close()

    # Loads

    def load_api(self, load: Load) -> Outcome:
        """Make the load from the client's process."""
        return self.client.ask(load)

    def load_engine(self, load: DirectLoad) -> Outcome:
        """Drive the engine directly."""
        return self.engine.ask(load)

    # What it costs

    def cpu_seconds(self) -> dict[str, float]:
        """What each part has used of the CPU so far; `engine` is the inference worker's engine process."""
        worker = psutil.Process(self.stack.children["inference"].process.pid)
        return {
            "api": _cpu_of([self._api()]),
            "worker": _cpu_of([worker]),
            "engine": _cpu_of(worker.children(recursive=True)),
            "postgres": _cpu_of(_family(self._supervisor.children["postgres"].process.pid)),
            "valkey": _cpu_of(_family(self._supervisor.children["valkey"].process.pid)),
        }

    @contextlib.contextmanager
    def watch_waiting(self, user: StackUser) -> Iterator["Watch"]:
        """Watch, while the block runs, the API process's memory and how many requests of `user` it has at once."""
        watch = Watch(self._api(), self._valkey.url, user)
        try:
            yield watch
        finally:
            watch.end()

    def _api(self) -> psutil.Process:
        return psutil.Process(self.stack.children["api"].process.pid)


def make_tiny_model_in(home: Path) -> Path:
    """Write the tiny model into a folder of `home`, in a process of its own: torch stays out of this one."""
    code = "import sys, pathlib; from tests.tiny_model import make_tiny_model as m; m(pathlib.Path(sys.argv[1]))"
    folder = home / "tiny"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise ChildFailed(f"The tiny model can't be made:\n{made.stderr[-LOG_TAIL_BYTES:]}")
    return folder


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_of(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class Watch:
    """`rss_before` and `rss_peak` of the API process in bytes, `waiting_peak` requests, and `threads_peak`."""

    def __init__(self, process: psutil.Process, broker_url: str, user: StackUser) -> None:
        self._process = process
        self._broker = redis.Redis.from_url(broker_url)
        self._places = f"acs:places:key-{user.key_id}"
        self.rss_before = self.rss_peak = process.memory_info().rss
        self.waiting_peak = self.threads_peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def end(self) -> None:
        """Watch no more."""
        self._is_over.set()
        self._thread.join()
        self._broker.close()

    def _sample(self) -> None:
        counted_at = 0.0
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.rss_peak = max(self.rss_peak, self._process.memory_info().rss)
            if time.monotonic() - counted_at > 5 * SAMPLE_SECONDS:
                counted_at = time.monotonic()
                self.threads_peak = max(self.threads_peak, self._process.num_threads())
                running = int(self._broker.scard(f"{self._places}:running"))
                waiting = int(self._broker.zcard(f"{self._places}:waiting"))
                self.waiting_peak = max(self.waiting_peak, running + waiting)
