"""The command `acs`."""

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(
    name="acs",
    no_args_is_help=True,
    # A traceback with local variables would show prompts and keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"acs {version('acsinfra')}")
        raise typer.Exit


@app.callback()
def acs(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Completions, Jobs and harvested activations of an ACS Infra server."""


def main() -> None:
    """Run the command."""
    app()
