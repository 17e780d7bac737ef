"""The launcher: its forks are processes like any other, but for what is imported already."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from acsinfra.quickstart.launcher import LaunchedProcess
from acsinfra.quickstart.supervisor import LAUNCHER, ChildFailed, Supervisor

# Something that neither the launcher nor a script below imports by itself.
MODULE = "colorsys"
TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "group": os.getpgid(0), "pid": os.getpid(),
                  "env": dict(os.environ), "imported": "colorsys" in sys.modules, "path": sys.path[:2]}), flush=True)
print("said", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAIT = "import time\nprint('waits', flush=True)\ntime.sleep(1000)"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "home")
    supervisor.start_launcher(env=os.environ, module=MODULE)
    yield supervisor
    supervisor.close()


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_script_runs_as_python_would_run_it(supervisor: Supervisor, tmp_path: Path) -> None:
    own = {"ONLY_THIS": "ü", "PYTHONPATH": str(tmp_path / "more")}
    child = supervisor.spawn_engine(
        "told", [script(tmp_path, TELL), "3", "ö"], env={**own, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert isinstance(child.process, LaunchedProcess)
    assert child.process.wait(120) == 3
    line, _, rest = child.log_text().partition("\n")
    told = json.loads(line)
    assert rest == "said\n"
    assert told["argv"] == [str(tmp_path / "script.py"), "3", "ö"]
    assert (told["name"], told["imported"]) == ("__main__", True)
    assert (told["path"], told["env"]) == ([str(tmp_path), str(tmp_path / "more")], own)
    assert told["group"] == told["pid"] == child.process.pid
    with pytest.raises(ChildFailed, match=r"(?s)told ended with status 3.*said"):
        supervisor.check()


def test_several_run_at_once_and_each_end_is_its_own(supervisor: Supervisor, tmp_path: Path) -> None:
    waiting = script(tmp_path, WAIT)
    children = [supervisor.spawn_engine(f"waits-{number}", [waiting], env=os.environ) for number in range(3)]
    while not all(child.log_text() for child in children):
        time.sleep(0.02)
    one, two, three = children
    one.process.kill()
    two.record.signal_group(signal.SIGTERM)
    assert (one.process.wait(120), two.process.wait(120)) == (-signal.SIGKILL, -signal.SIGTERM)
    assert three.process.poll() is None
    supervisor.stop(three.name)
    assert three.process.returncode == -signal.SIGTERM


def test_a_launcher_that_is_killed_is_seen_and_its_forks_are_ended(supervisor: Supervisor, tmp_path: Path) -> None:
    waiting = script(tmp_path, WAIT)
    child = supervisor.spawn_engine("waits", [waiting], env=os.environ)
    supervisor.children[LAUNCHER].process.kill()
    supervisor.children[LAUNCHER].process.wait()
    with pytest.raises(ChildFailed, match="launcher was killed by signal 9"):
        supervisor.check()
    assert child.process.poll() is None
    # Whoever is started now begins with Python itself.
    anew = supervisor.spawn_engine("anew", [script(tmp_path, TELL), "0"], env=os.environ)
    anew.process.wait(120)
    assert json.loads(anew.log_text().partition("\n")[0])["imported"] is False
    supervisor.close()
    assert child.process.wait(120) == -signal.SIGKILL
    assert not psutil.pid_exists(child.process.pid) or psutil.Process(child.process.pid).status() == "zombie"


def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "home")
    try:
        supervisor.start_launcher(env=os.environ, module="no_such_module")
        while not supervisor.is_launcher_ready:
            time.sleep(0.02)
        supervisor.children[LAUNCHER].process.wait()
        with pytest.raises(ChildFailed, match=r"(?s)launcher ended with status 1.*no_such_module"):
            supervisor.check()
    finally:
        supervisor.close()
