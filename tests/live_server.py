"""The API in this process, served by uvicorn in a thread over pytest-django's database: real HTTP, quick to start."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn

from accounts.models import ApiKey, User
from accounts.services import create_key, create_user
from acsinfra.asgi import application
from acsinfra.core import traffic


@dataclass(frozen=True)
class RawAnswer:
    """An answer as it came over the socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a JSON error."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


@dataclass(frozen=True)
class LiveServer:
    """Where the API listens."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(**{"base_url": self.url, "headers": headers, "timeout": 120, **options})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def send(self, request: bytes) -> RawAnswer:
        """Send bytes that no HTTP client would, and read one answer that has a Content-Length."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_answer(connection)


def read_answer(connection: socket.socket) -> RawAnswer:
    """Read one answer from a socket."""
    with connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        headers = {}
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return RawAnswer(status, headers, stream.read(int(headers.get("content-length", "0"))))


# Longer than any test: a server of this process adds no counts of requests beside tests that count rows or statements.
NEVER = 86_400.0


async def _add_nothing() -> None:
    """Stand in for `traffic.flush` at a server's end."""


@contextmanager
def serve() -> Iterator[LiveServer]:
    """Serve `acsinfra.asgi` until the block ends; its counts go into the database when asked for alone."""
    with socket.create_server(("127.0.0.1", 0)) as listener, patch.object(traffic, "FLUSH_SECONDS", NEVER):
        config = uvicorn.Config(application, loop="uvloop", http="httptools", access_log=False, log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="live-server")
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the API did not start"
                thread.join(0.02)
            yield LiveServer(listener.getsockname()[1])
        finally:
            # A module's server ends when the tables were emptied for the next test, which must find them so.
            with patch.object(traffic, "flush", _add_nothing):
                server.should_exit = True
                thread.join(60)
            traffic._counted.clear()
            assert not thread.is_alive(), "the API did not stop"


_made = iter(range(1_000_000))


def make_user(**fields: Any) -> User:
    """Make a User with a name and an address of their own."""
    name = f"user{next(_made)}"
    user = create_user(username=name, email=f"{name}@example.org", password=fields.pop("password", None))
    for field, value in fields.items():
        setattr(user, field, value)
    user.save()
    return user


def make_key(user: User | None = None, **fields: Any) -> tuple[ApiKey, str]:
    """Make a key, of a new User where none is given, and return it and its text."""
    key, text = create_key(user=user or make_user(), name="tests")
    for field, value in fields.items():
        setattr(key, field, value)
    key.save()
    return key, text
