"""`acs harvest` and `acs verify`."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from acsinfra.client.calls import HarvestOptions
from acsinfra.client.cli.options import JsonOption, LayersOption, ModelOption, connect, read_layers, wire_directions
from acsinfra.client.cli.output import errors_are_told, in_bytes, print_fields, print_json, print_line
from acsinfra.client.cli.progress import ProgressBars
from acsinfra.client.corpus import PROMPTS_AT_MOST, Caps, read_prompts, split_corpus
from acsinfra.client.folder import open_harvest
from acsinfra.client.harvesting import PATIENCE_SECONDS, HarvestRun
from acsinfra.client.job_files import STATISTICS
from acsinfra.client.run_state import RunState
from acsinfra.client.watcher import Watcher


def harvest(
    corpus: Annotated[
        str,
        typer.Argument(
            help='JSON lines (a string, or an object with "prompt" or "text"), a .txt with a prompt a line, or - for '
            "standard input."
        ),
    ],
    model: ModelOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the files; made where it is missing.")],
    layers: LayersOption = None,
    project_onto: Annotated[
        str | None,
        typer.Option(
            help="Write the residual stream along these directions instead of the stream: [1 to 64 directions, hidden] "
            "in FILE.npy or FILE.safetensors[:NAME]."
        ),
    ] = None,
    shard_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Prompts in each file. Default: 32.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=64, help="Only kept in the manifest.")] = None,
    no_special_tokens: Annotated[
        bool, typer.Option("--no-special-tokens", help="Add no start token: for text that already begins with one.")
    ] = False,
    corpus_format: Annotated[
        Literal["jsonl", "txt"] | None, typer.Option("--format", help="What the corpus is. Default: by its name.")
    ] = None,
    job_size: Annotated[
        int, typer.Option(min=1, max=PROMPTS_AT_MOST, help="Prompts in each Harvest job, at most.")
    ] = PROMPTS_AT_MOST,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Download each layer's mean and deviation alone, not the activations.")
    ] = False,
    connections: Annotated[int, typer.Option(min=1, max=64, help="Downloads at once.")] = 8,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that the server, a runner or the network may be away.")
    ] = PATIENCE_SECONDS,
    retry_cancelled: Annotated[
        bool, typer.Option("--retry-cancelled", help="Submit cancelled jobs again, though they were charged.")
    ] = False,
    resubmit: Annotated[
        bool, typer.Option("--resubmit", help="Send again what was sent over 23 hours ago and never answered.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be submitted, and submit nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Harvest the activations of a corpus of any size into a folder.

    Reads the corpus, submits it as Harvest jobs (as many prompts in each as the server takes, as many at once as your
    key may have), waits for them, and downloads their files, checked by their SHA-256. **The same command again goes
    on where it stopped**, whatever stopped it, and nothing is charged twice.

    ```
    export ACS_BASE_URL=http://127.0.0.1:8000/v1 ACS_API_KEY=sk-acs-…
    acs harvest prompts.jsonl --model smollm2-135m --layers 8,16,24 --out harvest/
    acs harvest prompts.txt -m smollm2-135m --layers all --shard-size 128 -o harvest/
    acs harvest prompts.jsonl -m smollm2-135m --project-onto probes.safetensors:truth -o truth/
    zcat corpus.jsonl.gz | acs harvest - -m smollm2-135m -o harvest/ --json > summary.json
    ```

    Then, in Python: `open_harvest("harvest/")` of `acsinfra.client` reads them.
    """
    again = "Interrupted. Jobs that were submitted go on; the same command goes on with them."
    with errors_are_told(as_json=as_json, when_interrupted=again):
        prompts = read_prompts(corpus, file_format=corpus_format)
        options: dict[str, Any] = {
            "layers": read_layers(layers),
            "shard_size": shard_size,
            "batch_size": batch_size,
            "add_special_tokens": False if no_special_tokens else None,
            "project_onto": None if project_onto is None else wire_directions(project_onto),
        }
        options = {name: value for name, value in options.items() if value is not None}
        if dry_run:
            _print_plan(prompts, job_size, as_json=as_json)
            return
        is_watched = sys.stderr.isatty() and not as_json
        bars = ProgressBars() if is_watched else Watcher()
        with connect(patience_s=patience) as client:
            run = HarvestRun(
                client,
                prompts,
                out,
                model=model,
                options=cast("HarvestOptions", options),
                watcher=bars,
                job_size=job_size,
                n_connections=connections,
                poll_s=3 if is_watched else 20,
                patience_s=patience,
                statistics_only=statistics,
                retry_cancelled=retry_cancelled,
                resubmit=resubmit,
            )
            with bars if isinstance(bars, ProgressBars) else contextlib.nullcontext():
                state = run.run()
        _print_summary(out, state, statistics_only=statistics, as_json=as_json)


def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a harvest.")],
    as_json: JsonOption = False,
) -> None:
    """Hash every file of a harvest again, and hold it to the manifest.

    ```
    acs verify harvest/
    ```
    """
    with errors_are_told(as_json=as_json):
        opened = open_harvest(folder)
        opened.verify()
        if as_json:
            print_json({"folder": str(folder), "n_shards": len(opened.shard_paths), "ok": True})
        else:
            print_line(f"{len(opened.shard_paths):,} shards are as they were written: {opened}")


def _print_plan(prompts: list[str], job_size: int, *, as_json: bool) -> None:
    pieces = split_corpus(prompts, Caps(prompts=job_size))
    plan = {
        "n_prompts": len(prompts),
        "n_jobs": len(pieces),
        # As the API counts: a byte may be a token, and each prompt has a start token.
        "reserved_tokens": sum(len(prompt.encode()) + 1 for prompt in prompts),
    }
    if as_json:
        print_json(plan)
    else:
        print_line(
            f"{plan['n_prompts']:,} prompts in {plan['n_jobs']:,} jobs. At most {plan['reserved_tokens']:,} tokens are "
            "held; what the model reads is charged."
        )


def _print_summary(out: Path, state: RunState, *, statistics_only: bool, as_json: bool) -> None:
    files = [
        path
        for part in state.parts
        for path in (out / part.folder_name).iterdir()
        if path.suffix == ".safetensors" and (path.name == STATISTICS or not statistics_only)
    ]
    opened = open_harvest(out)
    summary = {
        "folder": str(out),
        "model": state.model,
        "contents": opened.contents,
        "layers": list(opened.layers),
        "n_prompts": state.n_prompts,
        "n_tokens": opened.n_tokens,
        "charged_tokens": sum(part.tokens or 0 for part in state.parts),
        "n_files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "jobs": [{"job_id": part.job_id, "tokens": part.tokens, "folder": part.folder_name} for part in state.parts],
    }
    if as_json:
        print_json(summary)
        return
    print_fields(
        {
            "folder": out,
            "contents": f"{opened.contents} of {state.model}, layers {', '.join(map(str, opened.layers))}",
            "prompts": f"{state.n_prompts:,} in {len(state.parts):,} jobs, {opened.n_tokens:,} tokens",
            "charged": f"{summary['charged_tokens']:,} tokens",
            "files": f"{len(files):,}, {in_bytes(cast('int', summary['bytes']))}",
            "open it": f"from acsinfra.client import open_harvest; harvest = open_harvest({str(out)!r})",
        }
    )
