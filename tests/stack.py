"""The real processes for tests: the API, an inference worker, a runner, the scheduler, over a database of their own."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import httpx
import psutil

from acsinfra.quickstart.embedded import EmbeddedPostgres
from acsinfra.quickstart.supervisor import PROJECT, Child, Supervisor

Part = Literal["api", "inference", "runner", "scheduler"]
START_SECONDS = 480
GENEROUS = {"requests_at_once": 512, "requests_queued": 4096, "requests_per_minute": 1_000_000} | {
    "harvests_unfinished": 100
}

PREPARE = """
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("addmodel", "tiny", *options)
"""
MAKE_USER = """
from accounts.models import User
from accounts.services import create_key, create_user
user = create_user(username=name, email=f"{name}@example.org", password=None)
User.objects.filter(pk=user.pk).update(**limits)
key, text = create_key(user=user, name="tests")
result = {"id": user.pk, "key_id": key.pk, "username": user.username, "key": text}
"""


@dataclass(frozen=True)
class StackUser:
    """A User of the stack's database and the text of their key."""

    id: int
    key_id: int
    username: str
    key: str


class Stack:
    """The processes under test. Each part starts when it is first asked for, and stays until `close`.

    `env` is the environment of every part: change it before a part starts, or `restart` the part. `engines_from` is
    whose launcher starts the engines, where many stacks share one; None: the stack's own Supervisor's.
    """

    engines_from: ClassVar[Supervisor | None] = None

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        postgres: EmbeddedPostgres,
        broker_url: str,
        tiny_model: Path,
        name: str = "stack",
        model_options: Sequence[str] = (),
    ) -> None:
        """Make the database and its one Base model, `tiny`; `model_options` are of `addmodel`, for another source."""
        self._name = name
        self._supervisor = supervisor
        self._users = 0
        self.start_seconds: float = START_SECONDS
        self._console: subprocess.Popen[str] | None = None
        self.children: dict[str, Child] = {}
        self.tiny_model = tiny_model
        self.home = supervisor.home / name
        self.files = self.home / "files"
        self.files.mkdir(parents=True)
        # Bound, and never listening: nobody else is given the port before the API listens there, or while it is away.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            "ACSINFRA_HOME": str(self.home),
            "DATABASE_URL": postgres.create_database(name),
            "BROKER_URL": broker_url,
            "STORAGE_URL": self.files.as_uri(),
            "PUBLIC_URL": self.base_url,
            "SECRET_KEY": os.environ.get("SECRET_KEY") or secrets.token_urlsafe(50),
            "ALLOWED_HOSTS": "127.0.0.1,localhost",
            "ALLOW_PLAIN_HTTP": "true",
            "HF_HUB_OFFLINE": "1",
            "MONTHLY_TOKENS": "1000000000000",
            # So little that a runner stores the first shards of a job of seconds long before it reads the last.
            "HARVEST_MEMORY_BYTES": str(16 * 1024**2),
        }
        usual = ("--source", str(tiny_model), "--dtype", "float32", "--max-num-seqs", "64")
        self.django(PREPARE, options=[*(model_options or usual)])
        self.user = self.new_user()

    # Talking to it

    def manage(self, *arguments: str) -> str:
        """Run a management command in the stack's environment and return what it printed."""
        command = [sys.executable, "manage.py", *arguments]
        result = subprocess.run(command, cwd=PROJECT, env=self.env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"manage.py {arguments[0]} failed:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def django(self, code: str, **names: Any) -> Any:
        """Run Python `code` in a process that has the stack's settings, with the given names (JSON values).

        Returns what the code left in `result`, as JSON brings it back. Raises AssertionError with its traceback.
        """
        if self._console is None or self._console.poll() is not None:
            self._console = subprocess.Popen(
                [sys.executable, "-m", "tests.stack_console"],
                cwd=PROJECT,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._console.stdin is not None
        assert self._console.stdout is not None
        print(json.dumps({"code": code, "names": names}), file=self._console.stdin, flush=True)
        answer = json.loads(self._console.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def end_console(self) -> None:
        """End the process of `django`; the next call starts another."""
        if self._console is not None:
            # Closes its pipes too.
            self._console.communicate()
            self._console = None

    def new_user(self, **limits: int | None) -> StackUser:
        """Make a User with a key and generous limits, or the ones given (None: the setting's default)."""
        self._users += 1
        made = self.django(MAKE_USER, name=f"user{self._users}", limits={**GENEROUS, **limits})
        return StackUser(**made)

    def client(self, user: StackUser | None = None, **options: Any) -> httpx.Client:
        """Return an HTTP client with the key of `user` (the stack's own User by default), based at `/v1/`."""
        headers = {"Authorization": f"Bearer {(user or self.user).key}"}
        return httpx.Client(**{"base_url": f"{self.base_url}/v1/", "headers": headers, "timeout": 120, **options})

    def async_client(self, user: StackUser | None = None, **options: Any) -> httpx.AsyncClient:
        """Return an asynchronous HTTP client, as `client` does."""
        headers = {"Authorization": f"Bearer {(user or self.user).key}"}
        return httpx.AsyncClient(**{"base_url": f"{self.base_url}/v1/", "headers": headers, "timeout": 120, **options})

    # Its processes

    def start(self, *parts: Part) -> None:
        """Start the parts that do not run, and wait until each serves."""
        missing = [part for part in parts if part not in self.children]
        for part in missing:
            self.children[part] = self.spawn(part)
        for part in missing:
            self.wait_until_ready(part)

    def kill(self, part: Part) -> None:
        """End a part and its whole process group by SIGKILL."""
        self._supervisor.kill(self.children.pop(part).name)

    def stop(self, part: Part) -> None:
        """End a part by SIGTERM, as systemd does."""
        self._supervisor.stop(self.children.pop(part).name)

    def restart(self, part: Part) -> None:
        """End a part by SIGTERM if it runs, and start it again."""
        if part in self.children:
            self.stop(part)
        self.start(part)

    def close(self) -> None:
        """End every part."""
        for part in list(self.children):
            self.stop(cast("Part", part))
        self.end_console()
        self._reserved.close()

    def engine_process(self, part: Part) -> psutil.Process:
        """Return the process of a part that has its engine: a runner's is the child of the one that waits for it."""
        process = psutil.Process(self.children[part].process.pid)
        return process.children()[0] if part == "runner" else process

    def log(self, part: Part) -> str:
        """Return what a part has logged since it started."""
        return self.children[part].log_text()

    def log_tails(self, n_lines: int = 60) -> dict[str, str]:
        """Return the last lines of each part's log."""
        return {
            name: "\n".join(child.log_text().splitlines()[-n_lines:]) for name, child in list(self.children.items())
        }

    def wait_until_ready(self, part: Part) -> None:
        """Wait until a part serves. Raises ChildFailed if it ends instead."""
        tests: dict[str, Callable[[], bool]] = {
            "api": self._api_answers,
            "inference": self._inference_is_live,
            "runner": lambda: self._engines("runner") > 0,
            "scheduler": lambda: "ready" in self.log("scheduler"),
        }
        self.wait_for(tests[part], part=part)

    def wait_for(self, is_true: Callable[[], bool], *, part: Part, seconds: float | None = None) -> None:
        """Wait until `is_true`, while `part` runs; by default for as long as a start may take."""
        seconds = self.start_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while not is_true():
            self.children[part].check()
            assert time.monotonic() < deadline, f"{part} was not ready within {seconds} s:\n{self.log(part)[-4000:]}"
            time.sleep(0.1)

    def spawn(self, part: Part, *, name: str | None = None, model: str = "tiny") -> Child:
        """Start a part's process, an engine's from the launcher, and return it; `name` is what its log is called."""
        name = name or f"{self._name}-{part}"
        if part in ("inference", "runner"):
            if self.engines_from is not None:
                self.engines_from.start_launcher(env=os.environ)
                self._supervisor._launcher = self.engines_from._launcher
            else:
                self._supervisor.start_launcher(env=os.environ)
            return self._supervisor.spawn_engine(name, ["manage.py", part, model], env=self.env)
        if part == "scheduler":
            return self._supervisor.spawn(name, [sys.executable, "manage.py", part], env=self.env)
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--loop", "uvloop", "--http", "httptools"]
        command = [sys.executable, "-m", "uvicorn", "acsinfra.asgi:application", *options, "--no-access-log"]
        return self._supervisor.spawn(name, command, env=self.env)

    def _api_answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.base_url}/healthz").status_code == 200
        return False

    def _engines(self, kind: str, **which: str) -> int:
        code = "from inference.models import Engine; result = Engine.objects.filter(**which).count()"
        return int(self.django(code, which={"kind": kind, "pid": self.children[kind].process.pid, **which}))

    def _inference_is_live(self) -> bool:
        if "api" in self.children:
            with self.client() as client:
                answer = client.get("models/tiny")
            return answer.status_code == 200 and answer.json()["status"] == "live"
        return self._engines("inference", status="live") > 0
