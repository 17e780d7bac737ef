"""schemathesis against the running API: every check, on cases that it makes of the document.

The long run, of thousands of cases: `uv run pytest -m long -s tests/reference/test_schemathesis.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import Stack

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
LONG_SECONDS = 1800
SEED = 20_261_129
CASES_AT_LEAST = 60


def run_schemathesis(stack: Stack, *options: str, seconds: int) -> str:
    """Run it and return its summary; a failure is one of the test, with all that it says."""
    user = stack.new_user(jobs_unfinished=1_000_000, harvests_unfinished=1_000_000)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"]
    result = subprocess.run(
        [*command, f"{stack.base_url}/openapi.json", "--no-color", *options],
        cwd=PROJECT,
        env={**os.environ, "ACS_API_KEY": user.key, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-4_000:]
    return result.stdout[result.stdout.index("= SUMMARY =") :]


def test_no_check_fails_on_what_the_document_allows_or_forbids(inference_stack: Stack, harvest_stack: Stack) -> None:
    n_cases = 0
    # In one run; on a busy machine in as many as it takes, each by a seed of its own.
    for seed in range(SEED, SEED + 8):
        summary = run_schemathesis(inference_stack, "--seed", str(seed), "--max-time", "20", seconds=400)
        generated = re.search(r"([\d,]+) generated", summary)
        assert generated is not None, summary
        n_cases += int(generated[1].replace(",", ""))
        if n_cases > CASES_AT_LEAST:
            break
    assert n_cases > CASES_AT_LEAST


@pytest.mark.long
def test_no_check_fails_in_thousands_of_cases(inference_stack: Stack, harvest_stack: Stack) -> None:
    options = ("--max-time", str(LONG_SECONDS), "--workers", "4")
    sys.stdout.write(run_schemathesis(inference_stack, *options, seconds=LONG_SECONDS + 300))
