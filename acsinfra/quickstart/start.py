"""The quickstart: bring up every part, demonstrate, serve, and leave nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
import psycopg
from tokenizers import Tokenizer

from acsinfra.quickstart.demonstration import Demonstration, DemonstrationRefused, Shard
from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey
from acsinfra.quickstart.home import (
    StartRefused,
    check_engine_library,
    check_port,
    children_environment,
    has_cpu_engine,
    local_url,
    read_models,
    remove_env_file,
    write_env_file,
)
from acsinfra.quickstart.steps import RunningStep, Steps
from acsinfra.quickstart.supervisor import PROJECT, Child, ChildFailed, Supervisor

GIB = 1024**3
# What one engine process takes beside its weights and its keys and values.
ENGINE_BYTES = 3 * GIB


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an Exception: nothing that handles errors may hold it back."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Demonstrated:
    """What the demonstration left."""

    completion: dict[str, Any]
    job: dict[str, Any]
    harvest: dict[str, Any]
    shards: list[Shard]


@dataclass(frozen=True)
class Report:
    """Where everything is and what the demonstration left, None where it was refused: all that `--json` prints."""

    base_url: str
    api_key: str
    app_url: str
    username: str
    password: str
    models: list[str]
    demonstrated: Demonstrated | None
    seconds: dict[str, float]

    def as_json(self) -> str:
        """Return the one object."""
        values = {name: value for name, value in vars(self).items() if name != "demonstrated"}
        if self.demonstrated:
            values |= vars(self.demonstrated)
            values["shards"] = [shard.summary() for shard in self.demonstrated.shards]
        return json.dumps(values, ensure_ascii=False)


class Quickstart:
    """One start on one home.

    Raises StartRefused, HomeInUse, ChildFailed, DemonstrationFailed or (where the start `must_demonstrate`, as
    otherwise it says so and goes on) DemonstrationRefused, and Stopped on a signal.
    """

    def __init__(self, *, home: Path, host: str, port: int, must_demonstrate: bool) -> None:
        self._must_demonstrate = must_demonstrate
        self.models = read_models(os.environ.get("MODELS_FILE"))
        check_engine_library()
        self.host = host
        self.port = check_port(host, port)
        self.supervisor = Supervisor(home)
        self.home = self.supervisor.home
        self.steps = Steps()
        self.env: dict[str, str] = {}
        parent = psutil.Process().parent()
        self._uv = parent.pid if parent is not None and parent.name() == "uv" else None

    def run(self) -> Report:
        """Start everything and demonstrate."""
        try:
            return self._run()
        except (psycopg.Error, httpx.HTTPError) as error:
            time.sleep(1)  # what died under a request needs a moment to be seen
            self.check()
            raise ChildFailed(
                f"{type(error).__name__}: {error}. The logs in {self.supervisor.logs} say more."
            ) from error

    def _run(self) -> Report:
        if self.supervisor.leftovers:
            self.steps.say(f"Ended what an earlier start left behind: {', '.join(self.supervisor.leftovers)}.")
        self._start_launcher()
        fetches = self._begin_fetching()
        urls = self._start_parts()
        self.env = {**os.environ, **children_environment(self.home, host=self.host, port=self.port, urls=urls)}
        write_env_file(self.home, children_environment(self.home, host=self.host, port=self.port, urls=urls))
        self._finish_fetching(fetches)
        with self.steps.step("rows", "Database migrated, models and operator's key made"):
            account = self._bring_rows_up_to_date()
        self._start_processes()
        demonstrated = self._demonstrate_if_it_may(account["api_key"])
        self.steps.end()
        return Report(
            base_url=f"{self.env['PUBLIC_URL']}/v1",
            app_url=f"{self.env['PUBLIC_URL']}/app",
            models=[model["name"] for model in self.models],
            demonstrated=demonstrated,
            seconds=self.steps.seconds,
            **account,
        )

    def serve(self) -> None:
        """Watch the children until a signal comes. Raises ChildFailed when one ends by itself."""
        while True:
            self.check()
            time.sleep(0.5)

    def close(self) -> None:
        """End every child."""
        self.steps.end()
        remove_env_file(self.home)
        self.supervisor.close()

    def check(self) -> None:
        """Raise ChildFailed when a child has ended, and Stopped when the `uv run` around this process was killed."""
        self.supervisor.check()
        self._check_uv()

    def _check_uv(self) -> None:
        if self._uv is not None and os.getppid() != self._uv:
            raise Stopped(signal.SIGTERM)

    # The parts

    def _start_parts(self) -> dict[str, str]:
        urls = {}
        if not os.environ.get("DATABASE_URL"):
            # libpq's own variables (PGSSLMODE and its like) are about another server than ours.
            for name in [name for name in os.environ if name.startswith("PG")]:
                del os.environ[name]
            postgres = EmbeddedPostgres(self.supervisor)
            with self.steps.step("database", "PostgreSQL started"):
                postgres.start()
            urls["DATABASE_URL"] = postgres.url
        if not os.environ.get("BROKER_URL"):
            valkey = EmbeddedValkey(self.supervisor)
            with self.steps.step("broker", "Valkey started"):
                valkey.start()
            urls["BROKER_URL"] = valkey.url
        if not os.environ.get("STORAGE_URL"):
            (self.home / "files").mkdir(mode=0o700, exist_ok=True)
            urls["STORAGE_URL"] = (self.home / "files").as_uri()
        return urls

    def _start_launcher(self) -> None:
        """Import vLLM while the servers start, once for all engines; on GPUs each process has its own.

        The checkpoints are in the models cache before an engine starts: nothing is asked of the hub.
        """
        if has_cpu_engine():
            self.supervisor.start_launcher(env={**os.environ, "HF_HUB_OFFLINE": "1"})

    def _begin_fetching(self) -> list[tuple[dict[str, Any], Child, RunningStep]]:
        """Fetch and convert the checkpoints while the servers start."""
        fetches = []
        for model in self.models:
            arguments = [model["source"], str(self._models_cache), *filter(None, [model.get("revision")])]
            child = self.supervisor.spawn(
                f"fetch-{model['name']}",
                [sys.executable, "-m", "inference.engine.checkpoint", *arguments],
                env={**os.environ, "DJANGO_SETTINGS_MODULE": "acsinfra.settings"},
            )
            step = self.steps.begin(f"checkpoint_{model['name']}", f"Checkpoint of {model['name']} ready")
            fetches.append((model, child, step))
        return fetches

    def _finish_fetching(self, fetches: list[tuple[dict[str, Any], Child, RunningStep]]) -> None:
        for model, child, step in fetches:
            while child.process.poll() is None:
                self._check_uv()
                lines = child.log_text().splitlines()
                step.note(lines[-1] if lines else "")
                time.sleep(0.1)
            if child.process.returncode:
                step.forget()
                raise ChildFailed(f"The checkpoint of {model['name']} can't be had: {child.log_text().strip()[-2000:]}")
            self.supervisor.stop(child.name)
            step.done()

    @property
    def _models_cache(self) -> Path:
        return Path(os.environ.get("MODELS_CACHE") or self.home / "models")

    def _bring_rows_up_to_date(self) -> dict[str, str]:
        result = subprocess.run(
            [sys.executable, "-m", "acsinfra.quickstart.rows"],
            input=json.dumps({"models": self.models}),
            capture_output=True,
            text=True,
            check=False,
            cwd=PROJECT,
            env=self.env,
        )
        if result.returncode:
            raise ChildFailed(f"The database can't be brought up to date:\n{result.stderr.strip()[-4000:]}")
        account: dict[str, str] = json.loads(result.stdout)
        return account

    # The processes

    def _start_processes(self) -> None:
        with self.steps.step("api", f"API at {local_url(self.host, self.port)}"):
            options = ["--host", self.host, "--port", str(self.port), "--loop", "uvloop", "--http", "httptools"]
            options += ["--no-access-log", "--no-server-header", "--timeout-graceful-shutdown", "10"]
            self._spawn("api", "-m", "uvicorn", "acsinfra.asgi:application", *options)
            self._spawn("scheduler", "manage.py", "scheduler")
            while not self.supervisor.is_launcher_ready:
                self.check()
                time.sleep(0.05)
            for model in self.models:
                self._spawn_engine("inference", model["name"])
            if self._fits_in_memory(2):
                self._start_runners()
            self._wait_for_api()

    def _start_runners(self) -> None:
        for model in self.models:
            if model.get("has_harvest", True) and f"runner-{model['name']}" not in self.supervisor.children:
                self._spawn_engine("runner", model["name"])

    def _spawn(self, name: str, *command: str) -> Child:
        return self.supervisor.spawn(name, [sys.executable, *command], env=self.env)

    def _spawn_engine(self, part: str, model: str) -> None:
        self.supervisor.spawn_engine(f"{part}-{model}", ["manage.py", part, model], env=self.env)

    def _fits_in_memory(self, n_engines: int) -> bool:
        """Whether that many engines of each model can load at once."""
        weights = sum(file.stat().st_size for file in self._models_cache.glob("*/*.safetensors"))
        needed = n_engines * sum(ENGINE_BYTES + model.get("kv_cache_bytes", GIB) for model in self.models)
        return bool(psutil.virtual_memory().available > needed + 2 * n_engines * weights)

    def _wait_for_api(self) -> None:
        while True:
            self.check()
            try:
                if httpx.get(f"{local_url(self.host, self.port)}/healthz", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)

    # The demonstration

    def _demonstrate_if_it_may(self, api_key: str) -> Demonstrated | None:
        """Demonstrate, or serve without: what an operator switched off is switched on again on a server that runs."""
        try:
            return self._demonstrate(api_key)
        except DemonstrationRefused as refused:
            if self._must_demonstrate:
                raise
            self._start_runners()
            self.steps.say(f"The demonstration was refused: {refused}")
            return None

    def _demonstrate(self, api_key: str) -> Demonstrated:
        base_url = f"{local_url(self.host, self.port)}/v1"
        shown = next((model for model in self.models if model.get("has_harvest", True)), None)
        if shown is None:
            raise StartRefused("The demonstration needs a model whose harvest is on; MODELS_FILE has none.")
        demonstration = Demonstration(base_url=base_url, api_key=api_key, model=shown["name"], check=self.check)
        loads_both = f"runner-{shown['name']}" in self.supervisor.children
        harvest: dict[str, Any] | None = None
        try:
            with self.steps.step("inference", f"Inference serves {shown['name']}") as step:
                if loads_both:
                    # The runner loads its engine for its first job: submitting now lets both engines load together.
                    self._wait_for_runner(shown["name"])
                    harvest = demonstration.submit_harvest()
                found = demonstration.wait_for_inference(step.note)
            with self.steps.step("completion", "Completion answered"):
                completion = demonstration.complete()
            with self.steps.step("job", "Job run and its result fetched") as step:
                job = demonstration.run_job(step.note)
            self._start_runners()
            with self.steps.step("harvest", "Harvest job done") as step:
                if harvest is None:
                    self._wait_for_runner(shown["name"])
                    harvest = demonstration.submit_harvest()
                harvest = demonstration.wait_for_harvest(harvest, step.note)
            with self.steps.step("shards", "Shards downloaded, opened and checked"):
                shards = demonstration.read_shards(
                    harvest,
                    tokenizer=self._tokenizer(shown["name"]),
                    context=found["capabilities"]["max_model_len"],
                    hidden_size=found["capabilities"]["hidden_size"],
                    folder=self._demonstration_folder,
                )
        finally:
            demonstration.close()
        return Demonstrated(completion, job, harvest, shards)

    @cached_property
    def _demonstration_folder(self) -> Path:
        folder = self.home / "demonstration"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _wait_for_runner(self, name: str) -> None:
        """Wait until the runner has registered: a harvest that no runner would take is refused."""
        pid = self.supervisor.children[f"runner-{name}"].process.pid
        query = "SELECT 1 FROM inference_engine WHERE kind = 'runner' AND pid = %s"
        with psycopg.connect(self.env["DATABASE_URL"], autocommit=True) as connection:
            while not connection.execute(query, [pid]).fetchone():
                self.check()
                time.sleep(0.1)

    def _tokenizer(self, name: str) -> Tokenizer:
        query = """SELECT tokenizer_zstd FROM inference_checkpointfiles files
                   JOIN inference_basemodel model ON model.id = files.base_model_id WHERE model.name = %s"""
        with psycopg.connect(self.env["DATABASE_URL"]) as connection:
            row = connection.execute(query, [name]).fetchone()
        if row is None:
            raise ChildFailed(f"The tokenizer of {name} is not in the database.")
        return Tokenizer.from_buffer(_unpack(row[0]))


def _unpack(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(content)


@contextmanager
def signals_stop() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into Stopped; the ones after it change nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: Mapping[signal.Signals, Any] = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
