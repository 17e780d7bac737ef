"""Reading a corpus, and cutting it into jobs that the API takes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acsinfra.client import AcsError
from acsinfra.client.corpus import Caps, json_bytes, read_prompts, split_corpus
from harvest.models import PROMPTS_AT_MOST
from harvest.serializers import CODE_POINTS_AT_MOST


def test_json_lines_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('\ufeff"one"\r\n\n{"prompt": "tw\\no", "id": 2}\n  \n{"text": "thr\u2028ee"}')
    assert read_prompts(str(path)) == ["one", "tw\no", "thr\u2028ee"]


def test_a_text_has_a_prompt_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text('one\n\n "two" \n')
    assert read_prompts(str(path)) == ["one", ' "two" ']
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO('"é"\n'.encode())))
    assert read_prompts("-") == ["é"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"plain\n")))
    assert read_prompts("-", file_format="txt") == ["plain"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no prompt"),
        (b'"a"\n{', "line 2 is not JSON"),
        (b'"a"\n7', "line 2 is not a text"),
        (b'{"prompt": "a", "text": "b"}', "line 1 must have either"),
        (b'{"prompts": "a"}', "line 1 must have either"),
        (b'{"text": null}', "line 1 is not a text"),
        (b'"a"\n""', "line 2 is empty"),
        (b'"a\\u0000"', "line 1 holds a NUL"),
        (b'"\\ud800"', "line 1 holds a NUL or half"),
        (b'"\xff"', "not UTF-8: byte 1"),
        (json.dumps("x" * 8_000_001).encode(), "8,000,001 characters"),
    ],
)
def test_what_no_job_would_take_is_refused_with_its_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(AcsError, match=says) as refused:
        read_prompts(str(path))
    assert refused.value.code == "invalid_argument"
    with pytest.raises(AcsError, match="cannot be read"):
        read_prompts(str(tmp_path / "missing.jsonl"))


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=30),
    caps=st.builds(Caps, st.integers(1, 5), st.integers(12, 40), st.integers(74, 200)),
)
def test_jobs_hold_every_prompt_once_within_the_caps(prompts: list[str], caps: Caps) -> None:
    pieces = split_corpus(prompts, caps)
    assert [index for piece in pieces for index in piece] == list(range(len(prompts)))
    sizes: Any = [[prompts[index] for index in piece] for piece in pieces]
    for piece, after in zip(sizes, [*sizes[1:], None], strict=True):
        assert fits(piece, caps)
        # And no smaller than it must be.
        assert after is None or not fits([*piece, after[0]], caps)


def fits(prompts: list[str], caps: Caps) -> bool:
    return (
        len(prompts) <= caps.prompts
        and sum(map(len, prompts)) <= caps.code_points
        and sum(map(json_bytes, prompts)) <= caps.body_bytes
    )


def test_the_caps_are_the_apis() -> None:
    assert (Caps().prompts, Caps().code_points) == (PROMPTS_AT_MOST, CODE_POINTS_AT_MOST)
