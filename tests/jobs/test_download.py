"""A result as a file, from the App: however slowly it is read, it keeps no connection to the database."""

import socket
import time
from contextlib import ExitStack

import pytest
from django.db import connection
from django.test import Client

from acsinfra.core.storage import get_storage
from inference.models import BaseModel
from jobs import running
from jobs.services import Answer
from tests.jobs.conftest import OWNER, claimed, submit
from tests.live_server import LiveServer, make_key, serve

pytestmark = pytest.mark.django_db(transaction=True)

# More than the sockets hold.
RESULT_BYTES = 16 * 1024 * 1024
DOWNLOADS = 6


def begin_download(server: LiveServer, path: str, client: Client) -> socket.socket:
    """Ask for it, and read no more than the answer's first bytes."""
    cookie = client.cookies["sessionid"].value
    asking = server.connect()
    asking.sendall(f"GET {path} HTTP/1.1\r\nHost: testserver\r\nCookie: sessionid={cookie}\r\n\r\n".encode())
    assert asking.recv(12) == b"HTTP/1.1 200"
    return asking


def in_use() -> int:
    """How many of the pool's connections are lent."""
    stats: dict[str, int] = connection.pool.get_stats()  # type: ignore[attr-defined]
    return stats["pool_size"] - stats["pool_available"]


def test_slow_downloads_keep_no_connection_to_the_database(model: BaseModel, client: Client) -> None:
    key, _ = make_key()
    submit(key.user, key, model)
    job = claimed(model)
    running.note_files(job_id=job.pk, owner=OWNER)
    stored = get_storage().write(f"{job.storage_prefix}/result_1.json", b" " * RESULT_BYTES)
    answer = Answer(status=200, key=stored.key, bytes=stored.bytes)
    running.finish_job(job_id=job.pk, owner=OWNER, tokens=5, answer=answer)
    client.force_login(key.user)
    with serve() as server, ExitStack() as open_sockets:
        for _ in range(DOWNLOADS):
            open_sockets.enter_context(begin_download(server, f"/app/jobs/{job.pk}/download", client))
        deadline = time.monotonic() + 30
        # All but the test's own come back, though nothing more is read.
        while in_use() > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
