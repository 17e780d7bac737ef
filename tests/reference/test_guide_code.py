"""Every block of code in the guides runs against the real API, on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

from acsinfra.guides import SLUGS
from tests.reference.guide_blocks import script_of
from tests.stack import Stack

PROJECT = Path(__file__).resolve().parent.parent.parent
SECONDS = 480


def _environment(stack: Stack) -> dict[str, str]:
    user = stack.new_user()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "ACS_API_BASE": f"{stack.base_url}/v1", "ACS_API_KEY": user.key}


def _scripts(language: str) -> dict[str, str]:
    """Return each guide's script, with the name of the model that runs here."""
    scripts = {slug: script_of(slug, language).replace("smollm2-135m", "tiny") for slug in SLUGS}
    return {slug: text for slug, text in scripts.items() if text}


def test_the_python_of_the_guides_runs(inference_stack: Stack, harvest_stack: Stack) -> None:
    scripts = _scripts("python")
    assert {"set-up", "first-completion", "logprobs", "jobs", "activations", "steering", "harvest"} < set(scripts)
    result = subprocess.run(
        [sys.executable, "-m", "tests.reference.run_python_blocks"],
        cwd=PROJECT,
        env=_environment(inference_stack),
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # The pirate's vector changes the text, and scale 0 does not.
    assert len({line[4:] for line in result.stdout.splitlines() if line[:4] in ("0.2 ", "0.5 ", "0.35")}) > 1


def test_the_shell_of_the_guides_runs(inference_stack: Stack, harvest_stack: Stack, tmp_path: Path) -> None:
    environment = _environment(inference_stack)
    # curl fails on an HTTP error, but where a block shows one.
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    scripts = _scripts("sh")
    assert {"set-up", "first-completion", "jobs", "harvest", "budgets", "errors", "limits"} <= set(scripts)
    for guide, text in scripts.items():
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path,
            env={**environment, "CURL_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if guide == "errors":
            assert "HTTP/1.1 400" in result.stdout
            assert '"param":"max_tokens"' in result.stdout
        else:
            assert result.returncode == 0, f"{guide}: {result.stdout}\n{result.stderr}"
            assert "curl:" not in result.stderr, f"{guide}: {result.stderr}"
