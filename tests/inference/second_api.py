"""Further API processes beside a stack's own, with an environment of their own."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from acsinfra.quickstart.embedded import free_port
from acsinfra.quickstart.supervisor import PROJECT
from tests.stack import START_SECONDS, Stack


@contextmanager
def second_api(stack: Stack, log: Path, **env: str) -> Iterator[httpx.URL]:
    """Run it, and give its base URL for requests; `env` is added to the stack's."""
    with further_apis(stack, [log], **env) as (url,):
        yield url


@contextmanager
def further_apis(stack: Stack, logs: Sequence[Path], **env: str) -> Iterator[list[httpx.URL]]:
    """Run one for each of `logs`, and give their base URLs for requests; `env` is added to the stack's."""
    ports = [free_port() for _ in logs]
    processes = [_spawn(stack.env | env, port, log) for port, log in zip(ports, logs, strict=True)]
    try:
        deadline = time.monotonic() + START_SECONDS
        for port, log, process in zip(ports, logs, processes, strict=True):
            while not _answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield [httpx.URL(f"http://127.0.0.1:{port}/v1/") for port in ports]
    finally:
        for process in processes:
            process.terminate()
        try:
            for process, log in zip(processes, logs, strict=True):
                # uvicorn shuts down in order and then ends by the signal itself
                assert process.wait(timeout=30) in {0, -signal.SIGTERM}, log.read_text()
        finally:
            for process in processes:
                process.kill()


async def warm_up(stack: Stack, url: httpx.URL) -> None:
    """Let an API process open and read all that it needs: a request with a short time limit has its time for itself."""
    async with stack.async_client(base_url=url) as client:
        answer = await client.post("completions", json={"model": "tiny", "prompt": "The", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def _spawn(env: dict[str, str], port: int, log: Path) -> "subprocess.Popen[bytes]":
    options = ["--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
    command = [sys.executable, "-m", "uvicorn", "acsinfra.asgi:application", *options, "--no-access-log"]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=PROJECT, env=env, stdout=output, stderr=output)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    return False
