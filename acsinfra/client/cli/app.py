"""The command `acs`."""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from acsinfra.client.cli import complete, harvest, options
from acsinfra.client.cli.jobs import jobs
from acsinfra.client.cli.output import EXIT_CODES_HELP

app = typer.Typer(
    name="acs",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    # A traceback with local variables would show prompts and keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES_HELP,
)
app.command()(complete.complete)
app.command()(harvest.harvest)
app.command()(harvest.verify)
app.command()(complete.models)
app.command()(complete.budget)
app.add_typer(jobs)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"acs {version('acsinfra')}")
        raise typer.Exit


@app.callback()
def acs(
    base_url: Annotated[
        str | None, typer.Option(help="The server, such as http://127.0.0.1:8000/v1. Default: ACS_BASE_URL.")
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Completions, Jobs and harvested activations of an ACS Infra server.

    The server and the API key are those of the environment:

    ```
    export ACS_BASE_URL=http://127.0.0.1:8000/v1
    export ACS_API_KEY=sk-acs-…
    acs models
    acs complete "The capital of France is" --model smollm2-135m --max-tokens 8
    acs harvest prompts.jsonl --model smollm2-135m --layers 8,16,24 --out harvest/
    ```

    `acs COMMAND --help` has examples of each.
    """
    options.BASE_URL["base_url"] = base_url


def main() -> None:
    """Run the command; a reader that goes away (`acs … | head`) is no error."""
    try:
        app()
    except BrokenPipeError:
        # Nothing more can be said: also not by the flush at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
