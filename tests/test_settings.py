"""The guide for operators names every setting that the environment may give."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_setting_of_the_environment_is_in_the_table() -> None:
    settings = (ROOT / "acsinfra" / "settings.py").read_text()
    read = set(re.findall(r"""\benv(?:\.\w+)?\(\s*"([A-Z_]+)\"""", settings))
    table = "".join(
        line for line in (ROOT / "docs" / "run-your-own.md").read_text().splitlines() if line.startswith("| `")
    )
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert len(read) > 20
    assert named - {"FORWARDED_ALLOW_IPS"} == read  # uvicorn reads that one itself
