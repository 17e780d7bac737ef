"""What the API reads of Base models: a catalogue that is at most a second old, and their tokenizers."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from django.conf import settings

from acsinfra.core.db import fetch_one
from acsinfra.core.errors import ApiError, ErrorCode
from inference.tokenization import ModelTokenizer, load_tokenizer

EngineStatus = Literal["live", "starting", "unavailable"]
CATALOGUE_SECONDS: Final = 1.0
# The estimate for a model that never loaded here.
UNKNOWN_LOAD_SECONDS: Final = 60.0
MAX_LOGPROBS: Final = 100
BYTES_OF_DTYPE: Final[Mapping[str, int]] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})

# Engines count by the database's clock, so that hosts' clocks may differ.
CATALOGUE_SQL: Final = """
    SELECT coalesce(json_agg(row_to_json(entry) ORDER BY entry.name), '[]')::text FROM (
        SELECT m.id, m.name, m.served_model_name, floor(extract(epoch FROM m.created_at))::bigint AS created,
               m.n_layers, m.hidden_size, m.vocab_size, coalesce(m.max_model_len, m.context_length) AS max_model_len,
               m.activation_dtype, m.bos_token_id, m.has_harvest, f.sha256 AS tokenizer_sha256,
               coalesce(m.load_seconds, %(unknown)s) AS load_seconds,
               coalesce(e.inference_live, 0) AS inference_live, coalesce(e.inference_starting, 0) AS inference_starting,
               e.loading_for
          FROM inference_basemodel m
          JOIN inference_checkpointfiles f ON f.base_model_id = m.id
          LEFT JOIN (
              SELECT base_model_id,
                     count(*) FILTER (WHERE kind = 'inference' AND status = 'live') AS inference_live,
                     count(*) FILTER (WHERE kind = 'inference' AND status = 'starting') AS inference_starting,
                     extract(epoch FROM now() - min(started_at)
                             FILTER (WHERE kind = 'inference' AND status = 'starting'))::float8 AS loading_for
                FROM inference_engine
               WHERE heartbeat_at >= now() - %(silent_after)s
               GROUP BY base_model_id
          ) e ON e.base_model_id = m.id
         WHERE m.is_enabled
    ) entry
"""


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """An enabled Base model as the API knows it now. `max_model_len` is the context that requests have, in tokens.

    `loading_for` counts seconds since the oldest engine that is starting began; None where none is.
    """

    id: int
    name: str
    served_model_name: str
    created: int
    n_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    activation_dtype: Literal["bfloat16", "float16", "float32"]
    bos_token_id: int | None
    has_harvest: bool
    tokenizer_sha256: str
    load_seconds: float
    inference_live: int
    inference_starting: int
    loading_for: float | None

    @property
    def inference_status(self) -> EngineStatus:
        """Whether an engine answers Completions, is about to, or neither."""
        if self.inference_live:
            return "live"
        return "starting" if self.inference_starting else "unavailable"

    @property
    def seconds_until_live(self) -> int:
        """How long an engine that is starting may still load, at least 1: its last load less what it took so far."""
        return max(1, math.ceil(self.load_seconds - (self.loading_for or 0.0)))

    @property
    def max_activation_prompt_tokens(self) -> int:
        """The longest prompt whose activations at every layer fit `settings.MAX_ACTIVATION_BYTES`, in tokens."""
        return min(self.max_model_len, self._captured_tokens_at_most(self.n_layers))

    @property
    def full_vocab_max_prompt_tokens(self) -> int:
        """The prompt tokens of one request that may have the logprobs of the whole vocabulary.

        Each of those is an object in vLLM and in the answer, so a large vocabulary has fewer.
        """
        limit: int = min(settings.FULL_VOCAB_MAX_PROMPT_TOKENS, settings.FULL_VOCAB_MAX_LOGPROBS // self.vocab_size)
        return max(1, min(self.max_model_len, limit))

    def activation_tokens(self, n_layers_asked: int) -> int:
        """The most tokens that a capture of so many layers may have."""
        return min(self.max_model_len, self._captured_tokens_at_most(self.n_layers) * self.n_layers // n_layers_asked)

    def _captured_tokens_at_most(self, n_layers: int) -> int:
        bytes_per_token = n_layers * self.hidden_size * BYTES_OF_DTYPE[self.activation_dtype]
        limit: int = settings.MAX_ACTIVATION_BYTES
        return max(1, limit // bytes_per_token)

    async def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, loaded at its first use in this process."""
        return await _tokenizers.get(self.tokenizer_sha256)

    def as_json(self) -> dict[str, Any]:
        """The model as `GET /v1/models/{id}` answers it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "acsinfra",
            "served_model_name": self.served_model_name,
            "status": self.inference_status,
            "capabilities": {
                "max_model_len": self.max_model_len,
                "n_layers": self.n_layers,
                "hidden_size": self.hidden_size,
                "max_logprobs": MAX_LOGPROBS,
                "activations": True,
                "steering": True,
                "harvest": self.has_harvest,
                "max_activation_prompt_tokens": self.max_activation_prompt_tokens,
                "full_vocab_max_prompt_tokens": self.full_vocab_max_prompt_tokens,
            },
        }


@dataclass(frozen=True)
class Catalogue:
    """The enabled Base models by name."""

    models: Mapping[str, CatalogueModel]

    def get(self, name: str) -> CatalogueModel:
        """The model that requests call `name`; raises `400 model_not_found`."""
        model = self.models.get(name)
        if model is None:
            raise model_not_found(name)
        return model


def model_not_found(name: str) -> ApiError:
    """A `400 model_not_found` for a model that is not there, or was switched off."""
    return ApiError(
        ErrorCode.MODEL_NOT_FOUND,
        f"The model {name[:100]!r} does not exist here; GET /v1/models lists those that do.",
        param="model",
    )


def require_inference(model: CatalogueModel) -> None:
    """Raise `503 model_starting` (with `Retry-After`) or `503 model_unavailable` unless an engine is live."""
    if model.inference_status == "starting":
        seconds = model.seconds_until_live
        raise ApiError(
            ErrorCode.MODEL_STARTING,
            f"An engine for {model.name} is loading; try again in about {seconds} s.",
            headers={"Retry-After": str(seconds)},
        )
    if model.inference_status == "unavailable":
        raise ApiError(ErrorCode.MODEL_UNAVAILABLE, f"No engine is running for {model.name}.")


async def catalogue() -> Catalogue:
    """The models as they were at most a second ago; waiting callers share one read of the database."""
    return await _catalogue.get()


class _CachedCatalogue:
    """The catalogue of this process. A read belongs to the event loop that began it; its result serves all."""

    def __init__(self) -> None:
        self._value: Catalogue | None = None
        self._fresh_until = 0.0
        self._read: asyncio.Task[Catalogue] | None = None

    async def get(self) -> Catalogue:
        if self._value is not None and time.monotonic() < self._fresh_until:
            return self._value
        if self._read is None or self._read.done() or self._read.get_loop() is not asyncio.get_running_loop():
            self._read = asyncio.create_task(self._refresh())
        # A caller that goes away must not take the read from the others.
        return await asyncio.shield(self._read)

    async def _refresh(self) -> Catalogue:
        began = time.monotonic()
        row = await fetch_one(
            CATALOGUE_SQL, {"unknown": UNKNOWN_LOAD_SECONDS, "silent_after": settings.ENGINE_SILENT_AFTER}
        )
        models = msgspec.json.decode(row[0], type=list[CatalogueModel]) if row else []
        self._value = Catalogue(MappingProxyType({model.name: model for model in models}))
        self._fresh_until = began + CATALOGUE_SECONDS
        _tokenizers.keep_only({model.tokenizer_sha256 for model in models})
        return self._value


class _Tokenizers:
    """The tokenizers of this process by their SHA-256, each loaded once however many requests wait for it."""

    def __init__(self) -> None:
        self._loaded: dict[str, ModelTokenizer] = {}
        self._loading: dict[str, asyncio.Task[ModelTokenizer]] = {}

    async def get(self, sha256: str) -> ModelTokenizer:
        loaded = self._loaded.get(sha256)
        if loaded is not None:
            return loaded
        task = self._loading.get(sha256)
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._loading[sha256] = asyncio.create_task(self._load(sha256))
        return await asyncio.shield(task)

    def keep_only(self, wanted: set[str]) -> None:
        """Forget the tokenizers of models that are gone."""
        for sha256 in self._loaded.keys() - wanted:
            del self._loaded[sha256]

    async def _load(self, sha256: str) -> ModelTokenizer:
        row = await fetch_one(
            "SELECT tokenizer_zstd FROM inference_checkpointfiles WHERE sha256 = %s LIMIT 1", [sha256]
        )
        if row is None:
            # The model was removed or changed since the catalogue was read.
            raise ApiError(ErrorCode.SERVICE_UNAVAILABLE, "The model is being changed; try again.")
        self._loaded[sha256] = await asyncio.to_thread(load_tokenizer, bytes(row[0]))
        self._loading.pop(sha256, None)
        return self._loaded[sha256]


_catalogue = _CachedCatalogue()
_tokenizers = _Tokenizers()
