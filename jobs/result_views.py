"""What a page shows of a Completion: the text, each token's logprob as heat, and the shape and norms of activations."""

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from acsinfra.core.plots import Plot, plot_line
from acsinfra.core.storage import ObjectNotFoundError, StorageError, get_storage
from inference.tensors import decode_tensor
from jobs.models import JobResult

# A result up to this is read with its page; a larger one after it, and past the second not at all.
AT_ONCE_BYTES: Final = 256 * 1024
PARSED_AT_MOST_BYTES: Final = 96 * 1024 * 1024
CHOICES_AT_MOST: Final = 16
TOKENS_AT_MOST: Final = 2_000
ROWS_AT_MOST: Final = 400
ALTERNATIVES_AT_MOST: Final = 5
# How the values of each dtype travel.
_RAW: Final = {"torch.bfloat16": "<u2", "torch.float16": "<f2", "torch.float32": "<f4"}
# Where one shade of the heat map ends, in bits of surprise: -log2 of the token's probability.
SHADES: Final = (0.15, 0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0)


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Tensor(msgspec.Struct):
    data: str
    dtype: str
    original_dtype: str
    shape: list[int]
    compression: str | None = None


class _Activations(msgspec.Struct):
    residual_stream: _Tensor


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)
    activations: _Activations | None = None


class _Failure(msgspec.Struct):
    error: dict[str, Any]


@dataclass(frozen=True)
class HeatToken:
    """A token of a heat map: `shade` 0 (sure) to 9 (a surprise), None where it has no logprob."""

    text: str
    shade: int | None
    title: str
    logprob: float | None
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ShownChoice:
    """One choice: its text, and its tokens where logprobs were asked for, up to `TOKENS_AT_MOST`."""

    index: int
    text: str
    finish_reason: str | None
    tokens: tuple[HeatToken, ...]
    tokens_left_out: int

    @property
    def rows(self) -> tuple[HeatToken, ...]:
        """The tokens that the table has."""
        return self.tokens[:ROWS_AT_MOST]


@dataclass(frozen=True)
class ShownActivations:
    """A captured residual stream: its shape [layers, tokens, hidden], its dtype, and the mean norm by layer."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    layers: tuple[int, ...]
    norms: tuple[float, ...]
    plot: Plot

    @property
    def rows(self) -> list[tuple[int, float]]:
        """Each layer with its norm."""
        return list(zip(self.layers, self.norms, strict=True))


@dataclass(frozen=True)
class ShownResult:
    """What the page shows: a Completion, or what went wrong, or that it is too large or gone."""

    choices: tuple[ShownChoice, ...] = ()
    choices_left_out: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    activations: ShownActivations | None = None
    error_code: str = ""
    error_message: str = ""
    is_too_large: bool = False
    is_away: bool = False
    bytes: int = 0


def read_result(row: JobResult, *, capture_layers: tuple[int, ...] = ()) -> ShownResult:
    """The result of a Job for its page. `capture_layers` names the layers of its activations, ascending."""
    if row.bytes > PARSED_AT_MOST_BYTES:
        return ShownResult(is_too_large=True, bytes=row.bytes)
    try:
        body = bytes(row.body) if row.body is not None else get_storage().read(row.key)
    except ObjectNotFoundError:
        return ShownResult(error_code="job_failed", error_message="The result of this Job was lost.")
    except StorageError:
        return ShownResult(is_away=True)
    if row.status != 200:
        error = msgspec.json.decode(body, type=_Failure).error
        return ShownResult(error_code=str(error.get("code")), error_message=str(error.get("message")), bytes=row.bytes)
    return show_completion(msgspec.json.decode(body, type=_Completion), row.bytes, capture_layers)


def show_completion(completion: _Completion, n_bytes: int, capture_layers: tuple[int, ...]) -> ShownResult:
    """A Completion for a page."""
    activations = completion.activations
    return ShownResult(
        choices=tuple(_choice(choice) for choice in completion.choices[:CHOICES_AT_MOST]),
        choices_left_out=max(0, len(completion.choices) - CHOICES_AT_MOST),
        prompt_tokens=completion.usage.prompt_tokens,
        completion_tokens=completion.usage.completion_tokens or 0,
        activations=None if activations is None else _summary(activations.residual_stream, capture_layers),
        bytes=n_bytes,
    )


def _choice(choice: _Choice) -> ShownChoice:
    tokens: tuple[HeatToken, ...] = ()
    n_tokens = 0
    if choice.logprobs is not None:
        n_tokens = len(choice.logprobs.tokens)
        tops = choice.logprobs.top_logprobs or [None] * n_tokens
        entries = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, tops, strict=False)
        tokens = tuple(heat_token(*entry) for entry, _ in zip(entries, range(TOKENS_AT_MOST), strict=False))
    left_out = max(0, n_tokens - len(tokens))
    return ShownChoice(choice.index, choice.text, choice.finish_reason, tokens, left_out)


def heat_token(text: str, logprob: float | None, top: dict[str, float] | None) -> HeatToken:
    """A token with its shade, and what else might have stood there."""
    alternatives = tuple(sorted((top or {}).items(), key=lambda item: -item[1])[:ALTERNATIVES_AT_MOST])
    lines = ["no logprob" if logprob is None else f"logprob {logprob:.3f}, {100 * math.exp(min(0.0, logprob)):.3g} %"]
    lines += [f"{other!r} {value:.3f}" for other, value in alternatives]
    return HeatToken(text, shade_of(logprob), "\n".join(lines), logprob, alternatives)


def shade_of(logprob: float | None) -> int | None:
    """0 for a sure token to 9 for the most surprising."""
    if logprob is None:
        return None
    bits = -logprob / math.log(2)
    return sum(bits > end for end in SHADES)


def _summary(tensor: _Tensor, capture_layers: tuple[int, ...]) -> ShownActivations:
    fields = {name: getattr(tensor, name) for name in tensor.__struct_fields__}
    decoded = decode_tensor(fields)
    layers = capture_layers if len(capture_layers) == tensor.shape[0] else tuple(range(tensor.shape[0]))
    raw = np.frombuffer(decoded.data, dtype=_RAW[tensor.original_dtype]).reshape(tensor.shape)
    # A layer at a time: all in float32 would be twice the tensor.
    norms = tuple(float(np.linalg.norm(_as_float32(layer), axis=-1).mean()) for layer in raw)
    return ShownActivations(
        shape=tuple(tensor.shape),
        dtype=tensor.original_dtype.removeprefix("torch."),
        bytes=len(decoded.data),
        layers=layers,
        norms=norms,
        plot=plot_line(layers, norms, x_name="layer"),
    )


def _as_float32(raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values from how they travel: bfloat16 as its 16 bits."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)
