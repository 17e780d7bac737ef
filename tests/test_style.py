"""The rules that tools hold: lint, format, types, the direction of imports, and an API process without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

IMPORT_THE_API = """
import sys
import acsinfra.asgi
from django.urls import get_resolver, URLResolver

def visit(resolver):
    count = 0
    for entry in resolver.url_patterns:
        count += visit(entry) if isinstance(entry, URLResolver) else bool(entry.callback)
    return count

print(visit(get_resolver()), *sorted(sys.modules))
"""


def _run(*command: str | Path) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports", "--no-cache")],
    ids=lambda command: " ".join(command[:2]),
)
def test_tools_find_nothing_to_say(command: tuple[str, ...]) -> None:
    _run(BIN / command[0], *command[1:])


def test_migrations_match_the_models() -> None:
    _run(sys.executable, "manage.py", "makemigrations", "--check", "--dry-run")


def test_the_api_process_imports_neither_torch_nor_vllm() -> None:
    """Importing the ASGI application and every URL of it, as uvicorn does, loads no part of the engine."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_API], cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    n_routes, *modules = result.stdout.split()
    assert int(n_routes) > 0
    roots = {module.partition(".")[0] for module in modules}
    assert roots.isdisjoint({"torch", "vllm", "transformers"})
