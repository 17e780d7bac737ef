"""A further API process beside a stack's own, with an environment of its own."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from acsinfra.quickstart.embedded import free_port
from acsinfra.quickstart.supervisor import PROJECT
from tests.stack import START_SECONDS, Stack


@contextmanager
def second_api(stack: Stack, log: Path, **env: str) -> Iterator[httpx.URL]:
    """Run it, and give its base URL for requests; `env` is added to the stack's."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
    command = [sys.executable, "-m", "uvicorn", "acsinfra.asgi:application", *options, "--no-access-log"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=PROJECT, env=stack.env | env, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield httpx.URL(f"http://127.0.0.1:{port}/v1/")
    finally:
        process.terminate()
        try:
            # uvicorn shuts down in order and then ends by the signal itself
            assert process.wait(timeout=30) in {0, -signal.SIGTERM}, log.read_text()
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    return False
