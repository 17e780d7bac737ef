"""deploy/: every file is well formed, and every command in it is one that this checkout has."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands, load_command_class

from tests.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SLURM = DEPLOY / "slurm" / "engine.sbatch"
BEFORE = ["uv", "run", "--no-sync"]


def read_unit(path: Path) -> configparser.ConfigParser:
    # A key may be there twice; of those that are, the last one is kept.
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit


def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return read


def commands() -> Iterator[tuple[str, str]]:
    """Yield where a command stands and the command, with a model's name where one goes."""
    for path in UNITS:
        service = read_unit(path)["Service"]
        for name in ("ExecStartPre", "ExecStart"):
            if name in service:
                yield path.name, service[name].removeprefix("/usr/local/bin/").replace("%i", "tiny")
    for name, service in compose()["services"].items():
        command = service.get("command")
        if isinstance(command, str):
            yield f"compose {name}", re.sub(r"\$\{\w+:\?[^}]*\}", "tiny", command)


@pytest.mark.parametrize(("where", "command"), [pytest.param(*given, id=given[0]) for given in commands()])
def test_every_command_is_one_of_this_checkout(where: str, command: str) -> None:
    words = command.split()
    assert words[:3] == BEFORE, where
    program, *arguments = words[3:]
    if program == "uvicorn":
        known = subprocess.run([sys.executable, "-m", "uvicorn", "--help"], capture_output=True, text=True, check=True)
        assert arguments[0] == "acsinfra.asgi:application"
        assert {word for word in arguments if word.startswith("--")} <= set(re.findall(r"--[\w-]+", known.stdout))
        return
    assert program == "manage.py"
    name, *options = arguments
    command_class = load_command_class(get_commands()[name], name)
    command_class.create_parser("manage.py", name).parse_args(options)


def test_there_is_a_unit_for_every_part() -> None:
    assert [path.name for path in UNITS] == [
        "acsinfra-api.service",
        "acsinfra-inference@.service",
        "acsinfra-runner@.service",
        "acsinfra-scheduler.service",
    ]
    assert {"api", "scheduler", "inference", "runner", "postgres", "valkey"} == set(compose()["services"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_take_their_settings_from_a_file_and_stop_in_order(unit: Path, tmp_path: Path) -> None:
    service = read_unit(unit)["Service"]
    assert "/etc/acsinfra/acsinfra.env" in unit.read_text()
    assert (service["KillMode"], service["Restart"]) == ("mixed", "always")
    if analyze := shutil.which("systemd-analyze"):
        # uv stands elsewhere on this machine; all else is held to what systemd knows.
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace("/usr/local/bin/uv", "/bin/true"))
        result = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_compose_file_holds_together() -> None:
    read = compose()
    services = read["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert volumes <= set(read["volumes"]), name
    for name in ("api", "scheduler", "inference", "runner"):
        assert services[name]["env_file"] == "acsinfra.env"
        assert services[name]["environment"]["STORAGE_URL"].startswith("file:///var/lib/acsinfra/")
        assert "data:/var/lib/acsinfra" in services[name]["volumes"]
    assert (DEPLOY / services["api"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / services["api"]["build"]["dockerfile"]).exists()


def test_settings_are_those_of_the_guide() -> None:
    known = set(re.findall(r"`([A-Z_]+)`", (ROOT / "docs" / "run-your-own.md").read_text()))
    example = (DEPLOY / "acsinfra.env.example").read_text()
    named = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    named |= set(compose()["services"]["api"]["environment"])
    assert {"SECRET_KEY", "DATABASE_URL", "BROKER_URL", "STORAGE_URL"} <= named
    # boto3's own are AWS's.
    assert {name for name in named - known if not name.startswith("AWS_")} == set()
    assert all("=" in line for line in example.splitlines() if line and not line.startswith("#"))


def test_the_slurm_script_starts_what_it_is_asked_for(stack: Stack, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    settings = tmp_path / "acsinfra.env"
    names = ("DATABASE_URL", "BROKER_URL", "STORAGE_URL", "SECRET_KEY", "ALLOWED_HOSTS", "ALLOW_PLAIN_HTTP")
    settings.write_text("# of a cluster\n\n" + "\n".join(f"{name}={stack.env[name]}" for name in names))
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"ACSINFRA_ENV": str(settings), "ACSINFRA_CHECKOUT": str(ROOT), "ACSINFRA_HOME": str(tmp_path)}

    def run(*arguments: str, **changes: str) -> tuple[int, str]:
        command = ["bash", str(SLURM), *arguments]
        ended = subprocess.run(command, env=environment | changes, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    code, said = run("runner", "no-such-model")
    assert code != 0
    assert "There is no Base model 'no-such-model'" in said
    assert run("scheduler", "tiny")[0] == 2
    assert run("runner")[0] != 0
    code, said = run("runner", "tiny", ACSINFRA_ENV=str(tmp_path / "missing"))
    assert code == 2
    assert "ACSINFRA_ENV" in said
