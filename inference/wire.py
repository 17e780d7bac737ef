"""What crosses between the API and the engines: plain frozen data, importable without torch or vllm.

The API validates a request and makes these; an inference worker or a runner reads them. They travel as JSON
(`msgspec.json`), never as pickles. Bytes fields become base64 there.
"""

from typing import Literal

import msgspec

TensorDtype = Literal["bfloat16", "float16", "float32"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample: the fields of `POST /v1/completions`, already checked, by vLLM's own names.

    `logprobs` and `prompt_logprobs` count alternatives (-1: the whole vocabulary), None asks for none. The API takes
    two things that vLLM 0.32 itself refuses: a temperature over 2 (to 100), and temperature 0 with `n` over 1.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True


class SteeringVector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor added to the residual stream after each of `layer_indices`.

    `data` holds the tensor's bytes, little-endian, C order: shape [layers, hidden], or [layers, positions, hidden]
    with `position_indices`. `position_spans` are half-open. Positions are absolute, from 0, generated ones included.
    """

    data: bytes
    dtype: TensorDtype
    shape: tuple[int, ...]
    layer_indices: tuple[int, ...]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: tuple[int, ...] | None = None
    position_spans: tuple[tuple[int, int], ...] | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt for the engine. `capture_layers` ascend; empty captures nothing.

    Captured or steered requests have `sampling.n == 1`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    capture_layers: tuple[int, ...] = ()
    steering: tuple[SteeringVector, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate at one position; `rank` is 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int
    token: str


# A position's candidates: the token that stands there first, then the top ones as vLLM orders them.
PositionLogprobs = tuple[TokenLogprob, ...]


class EngineDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one of the `n` sequences of a request gained since its delta before.

    `prompt_logprobs` comes once, with the first delta of a request that asked (entry 0 is None). `finish_reason` is
    set on the last delta of this sequence.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to load a checkpoint; from the Base model's row.

    `checkpoint` is a folder or a hub id. `kv_cache_bytes` None leaves the size to vLLM on a GPU and means 1 GiB on
    CPU. `extra_args` are vLLM engine arguments, from the allow-list `inference.engine_args.ALLOWED`.
    """

    checkpoint: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    revision: str | None = None
    extra_args: dict[str, bool | int | float | str] = {}


class CompletionWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole `POST /v1/completions`, checked and tokenised: what the API sends to an inference worker.

    `prompt_texts` holds each prompt as given (None: token ids were given, so that echo decodes them). With `echo`
    and `logprobs`, `sampling.prompt_logprobs` is set, as vLLM's server does. `sampling.max_tokens` may be 0 (with
    `echo` only): the prompt is scored and nothing is generated. `is_steered` also says so when every vector had scale
    0 and `steering` is empty. `hold_tokens` are the prompts' tokens plus prompts * n * max_tokens. `created` and
    `deadline` are unix seconds; `user` is the caller's own word for their end user.
    """

    request_id: str
    model: str
    served_model_name: str
    created: int
    deadline: float
    prompts: tuple[tuple[int, ...], ...]
    prompt_texts: tuple[str | None, ...]
    sampling: Sampling
    hold_tokens: int
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    capture_layers: tuple[int, ...] = ()
    steering: tuple[SteeringVector, ...] = ()
    is_steered: bool = False
    user: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts together."""
        return sum(map(len, self.prompts))
