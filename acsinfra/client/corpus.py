"""A corpus of prompts: read from a file, and cut into pieces that a Harvest job takes."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from acsinfra.client.errors import AcsError, invalid_argument

type CorpusFormat = Literal["jsonl", "txt"]

PROMPTS_AT_MOST: Final = 4_096
CODE_POINTS_AT_MOST: Final = 8_000_000
# Of the 50 MiB of a request, what the fields beside the prompts may need.
BODY_BYTES_AT_MOST: Final = 50 * 1024 * 1024 - 64 * 1024
STANDARD_INPUT: Final = "-"
TEXT_KEYS: Final = ("prompt", "text")


@dataclass(frozen=True)
class Caps:
    """What one job takes; `body_bytes` are of the prompts as JSON."""

    prompts: int = PROMPTS_AT_MOST
    code_points: int = CODE_POINTS_AT_MOST
    body_bytes: int = BODY_BYTES_AT_MOST


def read_prompts(source: str, *, file_format: CorpusFormat | None = None) -> list[str]:
    """The prompts of a file, or of standard input for `-`.

    `.txt` has one a line; anything else is JSON lines: a string, or an object with "prompt" or "text". Blank lines are
    left out. Raises AcsError (`invalid_argument`) that names the line at fault.
    """
    chosen = file_format or ("txt" if Path(source).suffix == ".txt" else "jsonl")
    try:
        if source == STANDARD_INPUT:
            text = sys.stdin.buffer.read().decode("utf-8")
        else:
            text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise invalid_argument(f"{source} cannot be read: {error.strerror}.", param="prompts") from None
    except UnicodeDecodeError as error:
        raise invalid_argument(f"{source} is not UTF-8: byte {error.start}.", param="prompts") from None
    # Not splitlines(): a prompt may hold U+2028 and its like.
    prompts = list(_prompts_of(text.removeprefix("\ufeff").split("\n"), chosen, source))
    if not prompts:
        raise invalid_argument(f"{source} holds no prompt.", param="prompts")
    return prompts


def _prompts_of(lines: Iterable[str], file_format: CorpusFormat, source: str) -> Iterator[str]:
    for number, ended in enumerate(lines, start=1):
        line = ended.removesuffix("\r")
        if not line.strip():
            continue
        prompt = line if file_format == "txt" else _prompt_of_json(line, f"{source}, line {number}")
        check_prompt(prompt, f"{source}, line {number}")
        yield prompt


def _prompt_of_json(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        raise invalid_argument(f"{where} is not JSON.", param="prompts") from None
    if isinstance(value, dict):
        given = [key for key in TEXT_KEYS if key in value]
        if len(given) != 1:
            raise invalid_argument(f'{where} must have either "prompt" or "text".', param="prompts")
        return value[given[0]]
    return value


def check_prompt(prompt: object, where: str) -> None:
    """Raise AcsError (`invalid_argument`) for what the API would refuse whole jobs for."""
    if not isinstance(prompt, str):
        raise invalid_argument(f"{where} is not a text.", param="prompts")
    if not prompt:
        raise invalid_argument(f"{where} is empty.", param="prompts")
    if "\0" in prompt or not _is_unicode(prompt):
        raise invalid_argument(f"{where} holds a NUL or half a surrogate pair, which are no text.", param="prompts")
    if len(prompt) > CODE_POINTS_AT_MOST:
        raise invalid_argument(
            f"{where} has {len(prompt):,} characters; a job takes {CODE_POINTS_AT_MOST:,}.", param="prompts"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def split_corpus(prompts: Sequence[str], caps: Caps) -> list[range]:
    """Consecutive ranges of prompts, each a job; as many prompts in each as the caps allow. Raises AcsError."""
    pieces: list[range] = []
    start = code_points = body_bytes = 0
    for index, prompt in enumerate(prompts):
        prompt_bytes = json_bytes(prompt)
        if prompt_bytes > caps.body_bytes:
            raise invalid_argument(f"Prompt {index} alone is larger than a request may be.", param="prompts")
        is_full = (
            index - start >= caps.prompts
            or code_points + len(prompt) > caps.code_points
            or body_bytes + prompt_bytes > caps.body_bytes
        )
        if is_full:
            pieces.append(range(start, index))
            start, code_points, body_bytes = index, 0, 0
        code_points += len(prompt)
        body_bytes += prompt_bytes
    pieces.append(range(start, len(prompts)))
    return pieces


def json_bytes(prompt: str) -> int:
    """The bytes of a prompt in a request, its comma included."""
    return len(json.dumps(prompt, ensure_ascii=False).encode()) + 1


def may_be_split(error: AcsError) -> bool:
    """Whether a job that was refused with `error` may be taken as two."""
    return error.code in ("corpus_too_large", "request_too_large")
