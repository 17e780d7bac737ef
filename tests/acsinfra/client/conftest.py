"""What the client's tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from acsinfra.client import Client
from tests.stack import Stack, StackUser

ACS = Path(sys.executable).parent / "acs"
SENTENCES = (
    "The residual stream carries what each block adds to it.",
    "Rain fell on the harbour all morning, 日本 👩‍🚀 Łódź.",
    "Many hands make light work,\nbut too many cooks spoil the broth.",
    "H",
)

type MakeClient = Callable[..., Client]


def prompts(count: int) -> list[str]:
    """Return prompts that differ, of ragged lengths."""
    return [f"{number}: {SENTENCES[number % 4]} " * (1 + number % 5) for number in range(count)]


@dataclass(frozen=True)
class Command:
    """`acs` with a User's key, against the server at `url`."""

    url: str
    key: str

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "ACS_BASE_URL": self.url, "ACS_API_KEY": self.key, "COLUMNS": "100"}

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start it, and do not wait."""
        pipe = subprocess.PIPE
        return subprocess.Popen([ACS, *arguments], env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [ACS, *arguments], env=self.env, input=stdin, capture_output=True, text=True, timeout=240, check=False
        )

    def json(self, *arguments: str | Path, exit_code: int = 0, stdin: str | None = None) -> Any:
        """Run it with `--json`, and read what it printed; nothing else may be there."""
        ended = self.run(*arguments, "--json", stdin=stdin)
        assert (ended.returncode, ended.stderr) == (exit_code, ""), (ended.returncode, ended.stdout, ended.stderr)
        return json.loads(ended.stdout)


def command_of(stack: Stack, user: StackUser | None = None, *, port: int | None = None) -> Command:
    """Return `acs` for the stack's API, or a proxy to it."""
    return Command(f"http://127.0.0.1:{port or stack.port}", (user or stack.user).key)


def client_of(stack: Stack, user: StackUser | None = None, *, port: int | None = None, **options: Any) -> Client:
    """Return a client of the stack's API, or a proxy to it."""
    return Client(f"http://127.0.0.1:{port or stack.port}/v1", (user or stack.user).key, **options)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a corpus of 23 prompts as JSON lines of all three kinds."""
    path = tmp_path / "prompts.jsonl"
    lines: list[Any] = list(prompts(23))
    lines[3], lines[4] = {"prompt": lines[3], "id": 7}, {"text": lines[4]}
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    return path
