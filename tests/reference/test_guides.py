"""The guides: every code block is right, and every table agrees with the code."""

import json
import re
import shlex
from functools import cache
from typing import Any, Final

import jsonschema
import pytest
from django.core.management import get_commands, load_command_class
from django.test import Client

from acsinfra.core.errors import STATUS_OF_CODE, ErrorCode
from acsinfra.core.views import openapi_document
from acsinfra.guides import FOLDER, SLUGS, guides
from tests.reference.guide_blocks import Block, blocks

# What a cluster's blocks may call besides our own commands.
OTHER_PROGRAMS: Final = {"export", "git", "pg_dump", "pg_restore"}
GROUPS: Final = {"server", "cpu", "gpu", "dev"}


def _of(language: str, mark: str | None = None) -> list[Any]:
    found = [block for block in blocks() if block.language == language and mark in (None, block.mark)]
    assert found
    return [pytest.param(block, id=f"{block.guide} {index}") for index, block in enumerate(found)]


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(openapi_document())
    return loaded


def test_every_file_is_a_guide() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(SLUGS)
    assert all(guide.title and len(guide.html) > 500 for guide in guides().values())


def test_each_guide_is_a_page_and_llms_txt_has_them_all() -> None:
    client = Client()
    contents = client.get("/docs/guide").content.decode()
    everything = client.get("/llms.txt")
    assert everything["Content-Type"] == "text/plain; charset=utf-8"
    for guide in guides().values():
        assert f'href="/docs/guide/{guide.slug}"' in contents
        page = client.get(f"/docs/guide/{guide.slug}")
        assert page.status_code == 200
        assert f"# {guide.title}\n" in everything.content.decode()
    assert client.get("/docs/guide/nothing").status_code == 404
    assert client.get("/docs").status_code == 200


def test_links_between_guides_lead_somewhere() -> None:
    for guide in guides().values():
        for target in re.findall(r"\]\(([^)]+)\)", guide.text):
            assert target in SLUGS or target.startswith(("https://", "/app")), f"{guide.slug}: {target}"


def test_the_table_of_errors_has_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| (.+) \| (.+) \|$", guides()["errors"].text, re.MULTILINE)
    written = {code: status for code, status, _, _ in rows}
    expected = {code.value: str(STATUS_OF_CODE.get(code, 400)) for code in ErrorCode} | {"model_not_found": "400, 404"}
    assert written == expected
    assert len(rows) == len(expected)


@pytest.mark.parametrize("block", _of("json"))
def test_each_answer_that_is_shown_fits_its_schema(block: Block) -> None:
    schema = {"$ref": f"#/components/schemas/{block.mark}", "components": _document()["components"]}
    jsonschema.Draft202012Validator(schema).validate(json.loads(block.text))


@pytest.mark.parametrize("block", _of("sh", "cluster"))
def test_each_command_of_a_cluster_exists_with_its_options(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        whole = shlex.split(line)
        for words in (whole, *(shlex.split(word) for word in whole if " manage.py " in word)):
            if "manage.py" in words:
                _check_command(words[words.index("manage.py") + 1 :])
            elif words[:2] == ["uv", "sync"]:
                assert {words[at + 1] for at, word in enumerate(words) if word == "--group"} <= GROUPS
            elif "uvicorn" in words:
                assert "acsinfra.asgi:application" in words
            else:
                assert words[0] in OTHER_PROGRAMS | {"sbatch"}, line


def _check_command(words: list[str]) -> None:
    """Assert that Django parses the words as one of its commands."""
    name, *arguments = words
    command = load_command_class(get_commands()[name], name)
    parser = command.create_parser("manage.py", name)
    parser.parse_args(arguments)
