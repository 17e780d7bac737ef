"""A real S3 server that checks signatures: `rclone serve s3` over a folder."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ACCESS_KEY, SECRET_KEY = "tests-access", "tests-secret"


@dataclass(frozen=True)
class S3Server:
    """A running server with one empty bucket; `url` is what STORAGE_URL wants, `folder` holds the bucket's files."""

    endpoint: str
    bucket: str
    folder: Path
    pid: int

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/kept?endpoint={self.endpoint}&region=us-east-1"


@contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    """Serve `folder` on a free port of loopback until the block ends."""
    (folder / "bucket").mkdir(parents=True)
    log = folder.with_suffix(".log")
    command = [
        str(Path(sys.executable).with_name("rclone")),
        "--config=",
        "serve",
        "s3",
        f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
        "--addr=127.0.0.1:0",
        "--vfs-cache-mode=off",
        str(folder),
    ]
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as server:
        try:
            yield S3Server(endpoint=_endpoint(server, log), bucket="bucket", folder=folder / "bucket", pid=server.pid)
        finally:
            server.terminate()


def _endpoint(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/?\]", log.read_text()):
            return found.group(1)
        time.sleep(0.02)
    raise AssertionError(f"rclone did not start its S3 server: {log.read_text()}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the session; its credentials are in the environment, where boto3 finds them."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        with running_s3_server(Path(folder) / "s3") as server:
            yield server
