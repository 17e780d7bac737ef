"""What the command prints, and the exit code it ends with."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import httpx
import typer
from rich.console import Console
from rich.table import Table

from acsinfra.client import errors
from acsinfra.client.errors import AcsError

FAILED: Final = 1
WRONG_USAGE: Final = 2
KEY_REFUSED: Final = 3
LIMIT_REACHED: Final = 4
UNREACHABLE: Final = 5
JOB_NOT_DONE: Final = 6
CORRUPTED: Final = 7
INTERRUPTED: Final = 130

EXIT_CODES_HELP: Final = """
Exit codes: 0 done · 1 failed · 2 wrong usage, or a request that the server does not take · 3 the API key was not
accepted · 4 a limit was reached (Budget, Spend limit, rates) · 5 no answer, or no engine is there · 6 a job failed, was
cancelled, or is not over · 7 a file does not have its SHA-256 · 130 interrupted.
With `--json` standard output is one JSON value, an error too: `{"error": {"message", "code", "param", "status",
"request_id"}}`.
"""

_BY_CODE: Final = {
    errors.INVALID_ARGUMENT: WRONG_USAGE,
    errors.CONNECTION_FAILED: UNREACHABLE,
    errors.CORRUPTED_DOWNLOAD: CORRUPTED,
    errors.HARVEST_INCOMPLETE: JOB_NOT_DONE,
    errors.JOB_FAILED: JOB_NOT_DONE,
    errors.JOB_CANCELLED: JOB_NOT_DONE,
    errors.STILL_WAITING: JOB_NOT_DONE,
}


def exit_code(error: AcsError) -> int:
    """The exit code that says what kind of error it was."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    status = error.status or 0
    if status in (401, 403):
        return KEY_REFUSED
    if status == 429:
        return LIMIT_REACHED
    if status in (502, 503, 504):
        return UNREACHABLE
    return WRONG_USAGE if 400 <= status < 500 else FAILED


@contextlib.contextmanager
def errors_are_told(*, as_json: bool, when_interrupted: str = "Interrupted.") -> Iterator[None]:
    """End the command with the exit code of an AcsError, which is printed; and of Ctrl-C, and of a full disk."""
    try:
        yield
    except AcsError as error:
        if as_json:
            print_json(error.as_json())
        else:
            where = f" (request {error.request_id})" if error.request_id else ""
            sys.stderr.write(f"acs: {error.message}{where}\n")
        raise typer.Exit(exit_code(error)) from None
    except (OSError, httpx.HTTPError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        told = AcsError(str(error) or type(error).__name__, code="local_failure")
        if as_json:
            print_json(told.as_json())
        else:
            sys.stderr.write(f"acs: {told.message}\n")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{when_interrupted}\n")
        raise typer.Exit(INTERRUPTED) from None


def print_json(value: Any) -> None:
    """Print one JSON value."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their columns: drawn for a terminal, divided by tabs for a pipe."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            sys.stdout.write("\t".join(map(str, row)) + "\n")
        return
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table, markup=False)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print a name and a value a line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def print_line(text: str = "") -> None:
    """Print a line of the answer."""
    sys.stdout.write(f"{text}\n")


def in_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
