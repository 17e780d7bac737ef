"""A command that can't work says why in a sentence: no traceback, and no secret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from acsinfra.command_line import run

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("command", "settings", "says"),
    [
        (["listmodels"], {"DJANGO_SETTINGS_MODULE": "another.project"}, "Start a quickstart"),
        (["listmodels"], {"REQUESTS_AT_ONCE": "hidden"}, "REQUESTS_AT_ONCE"),
    ],
)
def test_a_command_that_cannot_work_says_why(
    tmp_path: Path, command: list[str], settings: dict[str, str], says: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME"}}
    ran = subprocess.run(
        [sys.executable, "manage.py", *command],
        cwd=PROJECT,
        env={**environment, "ACSINFRA_HOME": str(tmp_path), **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "hidden" not in ran.stderr


def test_an_argument_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(arguments: list[str]) -> None:
        "\udcff".encode()

    monkeypatch.setattr("acsinfra.command_line.execute_from_command_line", execute)
    with pytest.raises(SystemExit, match="not UTF-8"):
        run(["manage.py", "createkey", os.fsdecode(b"\xff")])


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(CommandError, match="a port is 0"):
        call_command("quickstart", "--port", "99999")
