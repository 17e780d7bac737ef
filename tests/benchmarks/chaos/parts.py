"""The processes that a chaos run starts, kills and starts again."""

import asyncio
import contextlib
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import psutil

from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey, free_port
from acsinfra.quickstart.supervisor import ChildFailed, Supervisor
from tests.stack import Part, Stack
from tests.tiny_model import make_tiny_model

# Quick, so that a run of minutes sees many leases and heartbeats run out.
TIMES = {
    "HEARTBEAT_SECONDS": "1",
    "ENGINE_SILENT_AFTER_SECONDS": "6",
    "LEASE_SECONDS": "12",
    "LEASE_RENEWAL_SECONDS": "3",
    "RUNNER_GRACE_SECONDS": "60",
    "ENGINE_TIME_LIMIT": "90",
}
WORKERS: tuple[Part, ...] = ("inference", "runner", "scheduler")


@dataclass(frozen=True)
class Victim:
    """A part that can be killed, and the seconds that it is then left alone, so that it does some work."""

    name: str
    rests: float


VICTIMS = (
    Victim("api-1", 12),
    Victim("api-2", 12),
    Victim("inference", 60),
    Victim("engine", 40),
    Victim("runner", 60),
    Victim("scheduler", 20),
    Victim("valkey", 30),
    Victim("valkey without its data", 50),
    Victim("postgres", 40),
)


class Parts:
    """PostgreSQL, Valkey, two API processes, an inference worker, a runner and the scheduler, under `home`."""

    def __init__(self, home: Path, *, seed: int) -> None:
        self._chance = random.Random(seed)
        self._supervisor = Supervisor(home)
        self._postgres = EmbeddedPostgres(self._supervisor)
        self._valkey = EmbeddedValkey(self._supervisor)
        self._rested_at: dict[str, float] = {}
        self._second_port = free_port()
        self.kills: Counter[str] = Counter()
        self.ended_by_themselves: Counter[str] = Counter()

    def start(self) -> None:
        """Start everything and wait until it serves; a minute or so."""
        self._postgres.start()
        self._valkey.start()
        tiny = make_tiny_model(self._supervisor.home / "tiny")
        self.stack = Stack(
            self._supervisor, postgres=self._postgres, broker_url=self._valkey.url, tiny_model=tiny, name="chaos"
        )
        self.stack.env |= TIMES
        self._spawn("api-1")
        self._spawn("api-2")
        for url in self.urls:
            self._wait_for(lambda url=url: _answers(url))  # type: ignore[misc]
        self.stack.children["api"] = self._supervisor.children["api-1"]
        self.stack.start(*WORKERS)

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(Exception):
            self.stack.close()
        self._supervisor.close()

    @property
    def urls(self) -> list[str]:
        """The base URL of each API process."""
        return [f"http://127.0.0.1:{port}/v1/" for port in (self.stack.port, self._second_port)]

    async def kill_one(self) -> None:
        """Kill -9 a part that is due, leave it dead for a moment, and start it again."""
        now = time.monotonic()
        due = [victim for victim in VICTIMS if self._rested_at.get(victim.name, 0.0) <= now]
        if due:
            victim = self._chance.choice(due)
            await asyncio.to_thread(self._kill_and_start, victim)
            self._rested_at[victim.name] = time.monotonic() + victim.rests * self._chance.uniform(0.7, 1.3)

    def revive(self) -> None:
        """Start again what has ended by itself, as an init system does."""
        for name in ("api-1", "api-2", *WORKERS):
            child = self._supervisor.children.get(self._child_of(name))
            if child is None or child.process.poll() is not None:
                self.ended_by_themselves[name] += 1
                self._restart(name)

    async def wait_until_calm(self, *, seconds: float) -> None:
        """Wait until every part serves again. Raises AssertionError past `seconds`."""
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(self._is_calm):
            assert time.monotonic() < deadline, "the parts did not come back"
            await asyncio.to_thread(self.revive)
            await asyncio.sleep(1)

    def _is_calm(self) -> bool:
        models = []
        for url in self.urls:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = httpx.get(f"{url}models/tiny", headers={"Authorization": f"Bearer {self.stack.user.key}"})
                models.append(answer.json())
        return len(models) == 2 and all(
            model.get("status") == "live" and model["capabilities"]["harvest"] for model in models
        )

    # Killing and starting

    def _kill_and_start(self, victim: Victim) -> None:
        pause = self._chance.choice((0.0, 0.3, 1.0, 3.0))
        if victim.name == "engine":
            engine = self._engine()
            if engine is not None:
                engine.kill()
                self.kills["engine"] += 1
            return
        if victim.name.startswith(("valkey", "postgres")):
            self._supervisor.kill(victim.name.split()[0])
            self.kills[victim.name] += 1
            time.sleep(pause)
            self._start_server(victim.name)
            return
        # The process alone, as the kernel does where memory runs out: what it started has to end by itself.
        child = self._supervisor.children[self._child_of(victim.name)]
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGKILL)
        self.kills[victim.name] += 1
        time.sleep(pause)
        self._restart(victim.name)

    def _start_server(self, name: str) -> None:
        if name == "postgres":
            self._postgres.start(port=self._postgres.port)
            return
        if name.endswith("without its data"):
            shutil.rmtree(self._supervisor.home / "valkey" / "appendonlydir", ignore_errors=True)
        self._valkey.start(port=self._valkey.port)

    def _restart(self, name: str) -> None:
        if self._child_of(name) in self._supervisor.children:
            self._supervisor.kill(self._child_of(name))
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        stack = self.stack
        if name.startswith("api"):
            port = stack.port if name == "api-1" else self._second_port
            command = [sys.executable, "-m", "uvicorn", "acsinfra.asgi:application", "--host", "127.0.0.1"]
            command += ["--port", str(port), "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
            self._supervisor.spawn(name, command, env=stack.env)
        else:
            part = cast("Part", name)
            stack.children[part] = stack.spawn(part, name=self._child_of(name))

    def _child_of(self, name: str) -> str:
        return name if name.startswith("api") else f"chaos-{name}"

    def _engine(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess, StopIteration):
            worker = psutil.Process(self._supervisor.children["chaos-inference"].process.pid)
            server = next(child for child in worker.children() if "forkserver" in " ".join(child.cmdline()))
            return next(iter(server.children()))
        return None

    def _wait_for(self, is_true: Callable[[], bool], *, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            self._supervisor.check()
            if time.monotonic() > deadline:
                raise ChildFailed(f"not ready within {seconds} s")
            time.sleep(0.1)


def _answers(base_url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(base_url.replace("/v1/", "/healthz")).status_code == 200
    return False
