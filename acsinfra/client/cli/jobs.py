"""`acs jobs`: Completion Jobs, and Harvest jobs one by one."""

from pathlib import Path
from typing import Annotated, cast

import typer

from acsinfra.client.calls import HarvestOptions
from acsinfra.client.cli.complete import (
    MaxTokensOption,
    PromptArgument,
    ReadLayersOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    completion_options,
    read_prompt,
)
from acsinfra.client.cli.options import FieldOption, JsonOption, ModelOption, connect, read_layers
from acsinfra.client.cli.output import errors_are_told, print_fields, print_json, print_line, print_table
from acsinfra.client.client import Client
from acsinfra.client.corpus import read_prompts
from acsinfra.client.errors import AcsError
from acsinfra.client.models import CompletionJob, HarvestJob

jobs = typer.Typer(
    name="jobs",
    no_args_is_help=True,
    help="""Jobs: Completions and harvests that run on the server, also when you go away.

    ```
    acs jobs submit "The sky is" -m smollm2-135m -n 200 --key sky-001
    acs jobs wait 019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10
    acs jobs list --harvest --status running
    ```
    """,
)

IdArgument = Annotated[str, typer.Argument(metavar="JOB", help="The id of a Job or a Harvest job.")]
HarvestOption = Annotated[bool, typer.Option("--harvest", help="Harvest jobs, not Completion Jobs.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="An Idempotency-Key: the same key again is the same job, charged once."),
]


@jobs.command("list")
def list_jobs(
    harvest: HarvestOption = False,
    status: Annotated[str | None, typer.Option(help="Only those with this status.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only those of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List your jobs, newest first.

    ```
    acs jobs list --status running
    acs jobs list --harvest -m smollm2-135m --limit 100 --json
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        if harvest:
            found = client.harvest_jobs(status=status, model=model, limit=limit)
            listed = [(job.id, job.raw) for job in found]
        else:
            listed = [(job.id, job.raw) for job in client.jobs(status=status, model=model, limit=limit)]
        if as_json:
            print_json([raw for _, raw in listed])
            return
        columns = ["status", "model", *(["n_prompts"] if harvest else []), "created_at"]
        print_table(["job", *columns], [(ident, *(raw[column] for column in columns)) for ident, raw in listed])


@jobs.command()
def show(job_id: IdArgument, as_json: JsonOption = False) -> None:
    """Show a job as it is now.

    ```
    acs jobs show 019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        _print_job(find_job(client, job_id), as_json=as_json)


@jobs.command()
def cancel(job_id: IdArgument, as_json: JsonOption = False) -> None:
    """Cancel a job; one that has ended stays as it is.

    ```
    acs jobs cancel 019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        is_harvest = isinstance(find_job(client, job_id), HarvestJob)
        _print_job(client.cancel_harvest(job_id) if is_harvest else client.cancel_job(job_id), as_json=as_json)


@jobs.command()
def wait(
    job_id: IdArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most; then exit code 6.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait for a job to end; a Completion is printed.

    ```
    acs jobs wait 019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10 --timeout 600
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        if isinstance(find_job(client, job_id), HarvestJob):
            _print_job(client.wait_for_harvest(job_id, timeout_s=timeout), as_json=as_json)
            return
        completion = client.wait_for_job(job_id, timeout_s=timeout)
        if as_json:
            print_json(completion.raw)
        else:
            for choice in completion.choices:
                print_line(choice.text)


@jobs.command()
def submit(
    prompt: PromptArgument,
    model: ModelOption,
    harvest: Annotated[
        bool, typer.Option("--harvest", help="PROMPT is a corpus's file: submit it as one Harvest job.")
    ] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    layers: ReadLayersOption = None,
    fields: FieldOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and do not wait for it; its id is printed.

    ```
    JOB=$(acs jobs submit "The sky is" -m smollm2-135m -n 200 --key sky-001)
    acs jobs wait $JOB
    acs jobs submit --harvest prompts.jsonl -m smollm2-135m --layers 8,16,24
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        job: CompletionJob | HarvestJob
        if harvest:
            read = read_layers(layers)
            options = cast("HarvestOptions", {} if read is None else {"layers": read})
            job = client.submit_harvest(read_prompts(prompt), model=model, idempotency_key=key, **options)
        else:
            chosen = completion_options(
                max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, layers=layers, fields=fields
            )
            job = client.submit_job(read_prompt(prompt), model=model, idempotency_key=key, **chosen)
        if as_json:
            print_json(job.raw)
        else:
            print_line(job.id)


@jobs.command()
def download(
    job_id: IdArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the files.")],
    as_json: JsonOption = False,
) -> None:
    """Download the files of a done Harvest job, checked by their SHA-256.

    ```
    acs jobs download 019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10 --out harvest/
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        opened = client.download_harvest(job_id, out)
        if as_json:
            print_json({"folder": str(out), "job_id": job_id, "n_prompts": len(opened), "n_tokens": opened.n_tokens})
        else:
            print_line(repr(opened))


def find_job(client: Client, job_id: str) -> CompletionJob | HarvestJob:
    """The Job or Harvest job with this id. Raises AcsError."""
    try:
        return client.job(job_id)
    except AcsError as error:
        if error.status != 404:
            raise
    return client.harvest_job(job_id)


def _print_job(job: CompletionJob | HarvestJob, *, as_json: bool) -> None:
    if as_json:
        print_json(job.raw)
        return
    shown = {name: value for name, value in job.raw.items() if not isinstance(value, dict)}
    print_fields({name: "-" if value is None else value for name, value in shown.items()})
