"""What the API answers, as typed objects. `raw` is the answer's JSON as it came, with every field."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, Self

from acsinfra.client.errors import INVALID_ANSWER, AcsError
from acsinfra.client.tensors import Array, decode_tensor

type Json = Mapping[str, Any]
HarvestStatus = Literal["pending", "running", "done", "failed", "cancelled"]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
HARVEST_ENDS: Final = frozenset({"done", "failed", "cancelled"})
JOB_ENDS: Final = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class Answer:
    """What all answers share: `from_json` takes each field from the key of its name, but for what `read` says."""

    raw: Json = field(repr=False, kw_only=True)
    KIND: ClassVar[str]

    @classmethod
    def from_json(cls, raw: Json) -> Self:
        """Read it. Raises AcsError (`invalid_answer`)."""
        try:
            taken = cls.read(raw)
            for one in fields(cls):
                if one.name not in taken:
                    taken[one.name] = raw if one.name == "raw" else raw[one.name]
            return cls(**taken)
        except (KeyError, TypeError, AttributeError) as error:
            raise AcsError(f"The answer is not {cls.KIND}.", code=INVALID_ANSWER) from error

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """The fields that are not a key of the answer, or may be missing there."""
        return {}


@dataclass(frozen=True)
class Choice(Answer):
    """One of the texts of a Completion; `raw` has its logprobs and token ids where they were asked for."""

    KIND = "a choice of a Completion"

    index: int
    text: str
    finish_reason: str | None

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """The reason comes with a stream's last chunk alone."""
        return {"finish_reason": raw.get("finish_reason")}


@dataclass(frozen=True)
class Completion(Answer):
    """An answer of `POST /v1/completions`. `model` is the checkpoint's name."""

    KIND = "a Completion"

    id: str
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """The choices, and the tokens as far as the answer counts them."""
        usage = raw.get("usage") or {}
        return {
            "choices": tuple(map(Choice.from_json, raw["choices"])),
            "prompt_tokens": usage.get("prompt_tokens", 0),
            "completion_tokens": usage.get("completion_tokens", 0),
        }

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
class CompletionChunk(Answer):
    """A part of a streamed Completion: what one or more choices gained. `usage` comes with the last, when asked for."""

    KIND = "a part of a Completion"

    choices: tuple[Choice, ...]
    usage: Json | None

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """Both may be missing."""
        return {"choices": tuple(map(Choice.from_json, raw.get("choices") or ())), "usage": raw.get("usage")}

    @property
    def text(self) -> str:
        """What the first choice gained."""
        return self.choices[0].text if self.choices else ""


@dataclass(frozen=True)
class Model(Answer):
    """A Base model and what requests may ask of it."""

    KIND = "a Base model"

    id: str
    served_model_name: str
    status: str
    max_model_len: int
    n_layers: int
    hidden_size: int
    has_harvest: bool

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """What is among its capabilities."""
        can = raw["capabilities"]
        named = {name: can[name] for name in ("max_model_len", "n_layers", "hidden_size")}
        return {**named, "has_harvest": can["harvest"]}


@dataclass(frozen=True)
class Budget(Answer):
    """The User's tokens of this month; `raw` has each API key's part too."""

    KIND = "a Budget"

    limit: int
    used: int
    held: int
    remaining: int
    period_end: str


@dataclass(frozen=True)
class CompletionJob(Answer):
    """A Completion that runs on the server."""

    KIND = "a Job"

    id: str
    model: str
    status: JobStatus
    request_id: str

    @property
    def is_ended(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.status in JOB_ENDS


@dataclass(frozen=True)
class HarvestJob(Answer):
    """A Harvest job. `result` has the links of a done one; each answer makes new links, which need no key."""

    KIND = "a Harvest job"

    id: str
    model: str
    status: HarvestStatus
    n_prompts: int
    reserved_tokens: int
    tokens: int | None
    layers: tuple[int, ...]
    error: str | None

    @classmethod
    def read(cls, raw: Json) -> dict[str, Any]:
        """The id has another name in the answer, and only a failed one has an error."""
        return {"id": raw["job_id"], "layers": tuple(raw["layers"]), "error": raw.get("error")}

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
