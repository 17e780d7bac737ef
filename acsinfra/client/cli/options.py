"""Options that several commands have, and how their texts are read."""

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from acsinfra.client.client import Client
from acsinfra.client.errors import CORRUPTED_DOWNLOAD, AcsError, invalid_argument
from acsinfra.client.shards import read_directions
from acsinfra.client.tensors import Array, encode_tensor

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output, and nothing else.")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="A Base model: `acs models` lists them.")]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", help='Layers to read, such as "8,16,24" or "0-3,15", or "all". Default: the quartiles.'),
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option("--field", "-f", help="Any other field of POST /v1/completions, as NAME=JSON: `-f logprobs=5`."),
]
BASE_URL: dict[str, str | None] = {"base_url": None}


# No model has as many; a longer range is a slip.
LAYER_AT_MOST: Final = 9_999


def connect(**options: Any) -> Client:
    """The client of the environment, or of `acs --base-url`."""
    return Client(BASE_URL["base_url"], **options)


def read_layers(text: str | None) -> list[int] | str | None:
    """The layers of `--layers`; "all" as it is. Raises AcsError."""
    if text is None or text == "all":
        return text
    layers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise invalid_argument(f'--layers must be like "8,16,24", "0-3" or "all", not {text!r}.', param="layers")
        low, high = int(first), int(last or first)
        if not low <= high <= LAYER_AT_MOST:
            raise invalid_argument(
                f"--layers must ascend within 0 to {LAYER_AT_MOST:,} in {piece.strip()!r}.", param="layers"
            )
        layers += range(low, high + 1)
    return layers


def read_fields(texts: list[str] | None) -> dict[str, Any]:
    """The fields of `--field NAME=JSON`; what is not JSON is a text. Raises AcsError."""
    fields: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise invalid_argument(f"--field must be NAME=JSON, not {text!r}.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def read_tensor(text: str) -> Array:
    """The tensor of `FILE.npy`, `FILE.safetensors` or `FILE.safetensors:NAME`. Raises AcsError."""
    path, colon, name = text.rpartition(":")
    if not colon or Path(text).exists():
        path, name = text, ""
    try:
        return read_directions(Path(path), name=name or None)
    except FileNotFoundError:
        raise invalid_argument(f"{path} is not there.") from None
    except (ValueError, OSError) as error:
        raise invalid_argument(f"{path} cannot be read: {error}") from None
    except AcsError as error:
        if error.code == CORRUPTED_DOWNLOAD:
            raise invalid_argument(str(error)) from None
        raise


def wire_directions(text: str) -> dict[str, Any]:
    """`--project-onto` as a request takes it; not compressed, so that the same file is always the same request."""
    return encode_tensor(read_tensor(text), compress=False)
