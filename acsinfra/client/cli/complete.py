"""`acs complete`, `acs models` and `acs budget`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from acsinfra.client.calls import CompletionOptions
from acsinfra.client.cli.options import (
    FieldOption,
    JsonOption,
    ModelOption,
    connect,
    read_fields,
    read_layers,
    read_tensor,
)
from acsinfra.client.cli.output import errors_are_told, print_fields, print_json, print_line, print_table
from acsinfra.client.errors import invalid_argument
from acsinfra.client.models import Completion
from acsinfra.client.tensors import steering_vector

PromptArgument = Annotated[str, typer.Argument(help="The text to complete, or - to read it from standard input.")]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy and repeatable.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; up to 4.")]
ReadLayersOption = Annotated[
    str | None, typer.Option("--layers", help='Also read these layers: "15", "8,16,24", "0-3" or "all".')
]


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`. Raises AcsError."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_argument(f"Standard input is not UTF-8: byte {error.start}.", param="prompt") from None


def completion_options(
    *,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: list[str] | None,
    layers: str | None,
    fields: list[str] | None,
) -> CompletionOptions:
    """The fields of a Completion from the options of a command. Raises AcsError."""
    read = read_layers(layers)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop or None,
        "output_residual_stream": True if read == "all" else read,
    }
    given = {name: value for name, value in options.items() if value is not None} | read_fields(fields)
    for name in ("model", "prompt", "stream"):
        if name in given:
            raise invalid_argument(f"--field takes no {name}.")
    return given  # type: ignore[return-value]  # --field may name any field; the server holds them to the contract


def complete(
    prompt: PromptArgument,
    model: ModelOption,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    layers: ReadLayersOption = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Where --layers go: a .npy, float32 [layers, tokens, hidden]."),
    ] = None,
    steer: Annotated[
        str | None,
        typer.Option(
            help="Add a Steering vector: [hidden] or [layers, hidden] in FILE.npy or FILE.safetensors[:NAME]."
        ),
    ] = None,
    steer_layers: Annotated[str | None, typer.Option(help='The layers that --steer is added at: "15".')] = None,
    steer_scale: Annotated[float, typer.Option(help="How much of it.")] = 1.0,
    norm_match: Annotated[bool, typer.Option("--norm-match", help="Scale it to the stream's own norm first.")] = False,
    fields: FieldOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a text; it is printed as it comes.

    ```
    acs complete "The capital of France is" -m smollm2-135m -n 8 -t 0
    acs complete "The sky is" -m smollm2-135m -n 4 --layers 8,15 --save stream.npy
    acs complete "I feel" -m smollm2-135m --steer joy.npy --steer-layers 15 --steer-scale 4
    acs complete - -m smollm2-135m -n 64 -f logprobs=5 -f top_p=0.9 --json < prompt.txt
    ```
    """
    with errors_are_told(as_json=as_json):
        options = completion_options(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, layers=layers, fields=fields
        )
        if (layers is None) != (save is None) and not as_json:
            raise invalid_argument("--layers and --save go together (or --layers and --json).")
        vectors = []
        if steer is not None:
            at = read_layers(steer_layers)
            if not isinstance(at, list):
                raise invalid_argument("--steer needs --steer-layers.", param="steer_layers")
            vectors.append(steering_vector(read_tensor(steer), at, scale=steer_scale, norm_match=norm_match))
        text = read_prompt(prompt)
        with connect() as client:
            if as_json or layers is not None or options.get("n", 1) != 1:
                _print_whole(client.complete(text, model=model, steering_vectors=vectors, **options), save, as_json)
                return
            for chunk in client.stream(text, model=model, steering_vectors=vectors, **options):
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            print_line()


def _print_whole(completion: Completion, save: Path | None, as_json: bool) -> None:
    stream = completion.residual_stream
    if save is not None and stream is not None:
        np.save(save, stream.astype(np.float32))
    if as_json:
        print_json(completion.raw)
        return
    for choice in completion.choices:
        print_line(choice.text)
    if save is not None and stream is not None:
        sys.stderr.write(f"{save}: float32 {list(stream.shape)}\n")


def models(as_json: JsonOption = False) -> None:
    """List the Base models, and what each can do.

    ```
    acs models
    acs models --json | jq -r '.[] | select(.capabilities.harvest) | .id'
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        found = client.models()
        if as_json:
            print_json([model.raw for model in found])
            return
        rows = [
            (model.id, model.status, model.n_layers, model.hidden_size, model.max_model_len, _yes(model.has_harvest))
            for model in found
        ]
        print_table(("model", "status", "layers", "hidden", "context", "harvest"), rows)


def budget(as_json: JsonOption = False) -> None:
    """Show the tokens of this month: used, held by work that runs, and left.

    ```
    acs budget
    acs budget --json | jq .remaining
    ```
    """
    with errors_are_told(as_json=as_json), connect() as client:
        found = client.budget()
        if as_json:
            print_json(found.raw)
            return
        print_fields(
            {
                "limit": f"{found.limit:,} tokens",
                "used": f"{found.used:,}",
                "held": f"{found.held:,}",
                "remaining": f"{found.remaining:,} until {found.period_end}",
            }
        )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
