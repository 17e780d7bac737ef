"""A cheap HTTP client under load, in a process of its own: a line of JSON in (a Load), a line of JSON out (an Outcome).

Each of its connections sends a request, reads the answer and sends the next, with no more than httptools' parser in
between: some 25 microseconds of CPU a request, so that on a small machine the client takes little from what it
measures. The Outcome says what it took.
"""

import asyncio
import itertools
import resource
import sys
import time
import uuid
from collections.abc import Iterator
from typing import cast

import httptools
import msgspec
import uvloop

from tests.benchmarks.figures import Outcome


class Load(msgspec.Struct, kw_only=True):
    """`requests` POSTs of `bodies` (JSON texts) to `path` with `keys`, each taken in turn, `clients` at a time.

    `idempotent` gives each an Idempotency-Key of its own. An answer with another status than `status` ends the load.
    """

    port: int
    path: str
    keys: list[str]
    bodies: list[str]
    clients: int
    requests: int
    idempotent: bool = False
    status: int = 200


class LoadFailed(Exception):
    """An answer had the wrong status, or a connection was lost; the message says more."""


class _Run:
    """One load: what is still to be sent, and what came back."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.requests = itertools.islice(_encode(load), load.requests)
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = 0.0
        self.ended_at: list[float] = []
        self.latencies: list[float] = []

    def note(self, began: float) -> None:
        now = time.perf_counter()
        self.ended_at.append(now - self.began)
        self.latencies.append(now - began)
        if len(self.latencies) == self.load.requests and not self.is_over.done():
            self.is_over.set_result(None)

    def fail(self, message: str) -> None:
        if not self.is_over.done():
            self.is_over.set_exception(LoadFailed(message))


class _Connection(asyncio.Protocol):
    """One client; the callbacks named `on_…` are the parser's."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent_at: float | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by its class.
        self._transport = cast("asyncio.Transport", transport)

    def send_next(self) -> None:
        assert self._transport is not None
        request = next(self._run.requests, None)
        if request is not None:
            self._sent_at = time.perf_counter()
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._run.fail(f"the answer can't be read: {error!r}")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != self._run.load.status:
            self._run.fail(f"status {status}: {b''.join(self._body)[:500]!r}")
            return
        self._body.clear()
        assert self._sent_at is not None
        sent_at, self._sent_at = self._sent_at, None
        self._run.note(sent_at)
        self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._sent_at is not None:
            self._run.fail(f"the connection was lost: {error!r}")

    def close(self) -> None:
        self._sent_at = None
        if self._transport is not None:
            self._transport.abort()


def _encode(load: Load) -> Iterator[bytes]:
    keys, bodies = itertools.cycle(load.keys), itertools.cycle(body.encode() for body in load.bodies)
    for key, body in zip(keys, bodies, strict=False):
        once = f"Idempotency-Key: {uuid.uuid4().hex}\r\n" if load.idempotent else ""
        head = (
            f"POST {load.path} HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\n{once}Content-Length: {len(body)}\r\n\r\n"
        )
        yield head.encode() + body


async def run_load(load: Load) -> Outcome:
    """Make the load; raises LoadFailed."""
    run = _Run(load)
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    try:
        for _ in range(min(load.clients, load.requests)):
            _, connection = await loop.create_connection(lambda: _Connection(run), "127.0.0.1", load.port)
            connections.append(connection)
        cpu, run.began = time.process_time(), time.perf_counter()
        for connection in connections:
            connection.send_next()
        await run.is_over
        cpu = time.process_time() - cpu
    finally:
        for connection in connections:
            connection.close()
    return Outcome(ended_at=run.ended_at, latencies=run.latencies, cpu_seconds=cpu)


def main() -> None:
    """Serve loads until standard input closes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for line in sys.stdin:
        try:
            answer: object = uvloop.run(run_load(msgspec.json.decode(line, type=Load)))
        except (LoadFailed, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
