"""What the API answers, as typed objects. `raw` is the answer's JSON as it came, with every field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, Self

from acsinfra.client.errors import INVALID_ANSWER, AcsError
from acsinfra.client.tensors import Array, decode_tensor

type Json = Mapping[str, Any]
HarvestStatus = Literal["pending", "running", "done", "failed", "cancelled"]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
HARVEST_ENDS: Final = frozenset({"done", "failed", "cancelled"})
JOB_ENDS: Final = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class Choice:
    """One of the texts of a Completion; `raw` has its logprobs and token ids where they were asked for."""

    index: int
    text: str
    finish_reason: str | None
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it."""
        return cls(raw["index"], raw["text"], raw.get("finish_reason"), raw)


@dataclass(frozen=True)
class Completion:
    """An answer of `POST /v1/completions`. `model` is the checkpoint's name."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        with_usage = raw.get("usage") or {}
        try:
            return cls(
                id=raw["id"],
                model=raw["model"],
                choices=tuple(map(Choice.from_json, raw["choices"])),
                prompt_tokens=with_usage.get("prompt_tokens", 0),
                completion_tokens=with_usage.get("completion_tokens", 0),
                raw=raw,
            )
        except (KeyError, TypeError) as error:
            raise AcsError("The answer is not a Completion.", code=INVALID_ANSWER) from error

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @cached_property
    def residual_stream(self) -> Array | None:
        """[layers, tokens, hidden], layers ascending; None where `output_residual_stream` was not asked for.

        Tokens are the prompt's and the generated ones but the last, which never went through the model.
        bfloat16 is `ml_dtypes.bfloat16`; `.astype(np.float32)` is exact.
        """
        activations = self.raw.get("activations")
        return decode_tensor(activations["residual_stream"]) if activations else None


@dataclass(frozen=True)
class CompletionChunk:
    """A part of a streamed Completion: what one or more choices gained. `usage` comes with the last, when asked for."""

    choices: tuple[Choice, ...]
    usage: Json | None
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it."""
        return cls(tuple(map(Choice.from_json, raw.get("choices") or ())), raw.get("usage"), raw)

    @property
    def text(self) -> str:
        """What the first choice gained."""
        return self.choices[0].text if self.choices else ""


@dataclass(frozen=True)
class Model:
    """A Base model and what requests may ask of it."""

    id: str
    served_model_name: str
    status: str
    max_model_len: int
    n_layers: int
    hidden_size: int
    has_harvest: bool
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        try:
            can = raw["capabilities"]
            return cls(
                id=raw["id"],
                served_model_name=raw["served_model_name"],
                status=raw["status"],
                max_model_len=can["max_model_len"],
                n_layers=can["n_layers"],
                hidden_size=can["hidden_size"],
                has_harvest=can["harvest"],
                raw=raw,
            )
        except (KeyError, TypeError) as error:
            raise AcsError("The answer is not a Base model.", code=INVALID_ANSWER) from error


@dataclass(frozen=True)
class Budget:
    """The User's tokens of this month; `raw` has each API key's part too."""

    limit: int
    used: int
    held: int
    remaining: int
    period_end: str
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        try:
            figures = (raw["limit"], raw["used"], raw["held"], raw["remaining"], raw["period_end"])
        except (KeyError, TypeError) as error:
            raise AcsError("The answer is not a Budget.", code=INVALID_ANSWER) from error
        return cls(*figures, raw)


@dataclass(frozen=True)
class CompletionJob:
    """A Completion that runs on the server."""

    id: str
    model: str
    status: JobStatus
    request_id: str
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        try:
            return cls(raw["id"], raw["model"], raw["status"], raw["request_id"], raw)
        except (KeyError, TypeError) as error:
            raise AcsError("The answer is not a Job.", code=INVALID_ANSWER) from error

    @property
    def is_ended(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.status in JOB_ENDS


@dataclass(frozen=True)
class HarvestJob:
    """A Harvest job. `result` has the links of a done one; each answer makes new links, which need no key."""

    id: str
    model: str
    status: HarvestStatus
    n_prompts: int
    reserved_tokens: int
    tokens: int | None
    layers: tuple[int, ...]
    error: str | None
    raw: Json = field(repr=False)

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        try:
            return cls(
                id=raw["job_id"],
                model=raw["model"],
                status=raw["status"],
                n_prompts=raw["n_prompts"],
                reserved_tokens=raw["reserved_tokens"],
                tokens=raw["tokens"],
                layers=tuple(raw["layers"]),
                error=raw.get("error"),
                raw=raw,
            )
        except (KeyError, TypeError) as error:
            raise AcsError("The answer is not a Harvest job.", code=INVALID_ANSWER) from error

    @property
    def is_ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.status in HARVEST_ENDS

    @property
    def prompts_done(self) -> int:
        """How many prompts are read."""
        if self.status == "done":
            return self.n_prompts
        return int((self.raw.get("progress") or {}).get("prompts", 0))

    @property
    def result(self) -> Json | None:
        """The links and figures of a done job whose files are kept."""
        return self.raw.get("result")
