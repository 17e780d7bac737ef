"""The start self-test, the part of the front: an engine serves only after its captures and steering were right.

First the workers decide which tensor is the residual stream. Then two requests go the whole way a user's would,
one plain and one steered, and the captured last layer must give the very logprobs that the engine gave.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inference.engine.activations import CapturedActivations, to_float32
from inference.engine.errors import EngineRefused
from inference.engine.open_request import EngineFacts
from inference.wire import EngineDelta, EngineRequest, PositionLogprobs, Sampling, SteeringVector

_PROMPT_TOKENS = 8
_GENERATED_TOKENS = 4
# Largest differences that rounding explains: of logprobs, and of the stream relative to its norm.
_LOGPROB_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
_STREAM_TOLERANCE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}


class TestableEngine(Protocol):
    """What the self-test needs of a front."""

    @property
    def facts(self) -> EngineFacts:
        """What the engine serves."""

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a worker method on every rank."""

    async def answer(self, request: EngineRequest) -> tuple[list[EngineDelta], CapturedActivations | None]:
        """Run a request to its end."""


@dataclass(frozen=True)
class _Run:
    stream: npt.NDArray[np.float32]
    """[layers, tokens, hidden]"""
    last_rows: bytes
    logprobs: list[PositionLogprobs]
    """For each row the engine's logprobs of what comes next."""


async def run_self_test(engine: TestableEngine) -> None:
    """Raise `EngineRefused` with a sentence unless captures and steering are right."""
    facts = engine.facts
    await engine.call_workers("arm_stream_check")
    await engine.answer(_make_request(facts, "plain", capture=False, steering=()))
    for settled in await engine.call_workers("settle_stream_kind"):
        if not settled["kind"]:
            raise EngineRefused(
                f"which tensor of this model is its residual stream could not be decided: {settled['errors']}"
            )
    plain = await _run(engine, "captured", ())
    await _require_right_logprobs(engine, plain, "captured")
    layer = facts.n_layers // 2
    span = (2, _PROMPT_TOKENS + 2)
    vector = _make_vector(plain, layer)
    steering = SteeringVector(
        data=vector.tobytes(),
        dtype="float32",
        shape=(1, facts.hidden_size),
        layer_indices=(layer,),
        position_spans=(span,),
    )
    steered = await _run(engine, "steered", (steering,))
    _require_right_steering(facts, plain, steered, vector, layer=layer, first=span[0])
    await _require_right_logprobs(engine, steered, "steered")


def _make_request(
    facts: EngineFacts, name: str, *, capture: bool, steering: tuple[SteeringVector, ...]
) -> EngineRequest:
    step = max(1, facts.vocab_size // (_PROMPT_TOKENS + 2))
    prompt = tuple((step * (index + 1)) % facts.vocab_size for index in range(_PROMPT_TOKENS))
    return EngineRequest(
        request_id=f"self-test-{name}",
        prompt_token_ids=prompt,
        sampling=Sampling(
            max_tokens=_GENERATED_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=5
        ),
        capture_layers=tuple(range(facts.n_layers)) if capture else (),
        steering=steering,
    )


async def _run(engine: TestableEngine, name: str, steering: tuple[SteeringVector, ...]) -> _Run:
    deltas, captured = await engine.answer(_make_request(engine.facts, name, capture=True, steering=steering))
    if captured is None:
        raise EngineRefused("the engine captured nothing in its self-test")
    prompt_logprobs = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())
    logprobs = [position for position in prompt_logprobs if position is not None]
    for delta in deltas:
        logprobs.extend(delta.logprobs or ())
    if len(logprobs) != captured.array.shape[1]:
        raise EngineRefused(f"the self-test has {captured.array.shape[1]} rows for {len(logprobs)} logprobs")
    return _Run(to_float32(captured.array, captured.dtype), captured.array[-1].tobytes(), logprobs)


async def _require_right_logprobs(engine: TestableEngine, run: _Run, name: str) -> None:
    token_ids = [[entry.token_id for entry in position] for position in run.logprobs]
    answers = await engine.call_workers("score_stream_rows", run.last_rows, token_ids)
    scores = next((answer for answer in answers if answer), None)
    if scores is None:
        raise EngineRefused("no worker of the engine could compute logprobs in its self-test")
    worst = max(
        abs(score - entry.logprob)
        for row, position in zip(scores, run.logprobs, strict=True)
        for score, entry in zip(row, position, strict=True)
    )
    if not worst <= _LOGPROB_TOLERANCE[engine.facts.dtype]:
        raise EngineRefused(f"the {name} residual stream does not give the engine's logprobs: off by {worst:.3g}")


def _make_vector(plain: _Run, layer: int) -> npt.NDArray[np.float32]:
    """A fixed direction, half as long as the stream is on average: enough to show, not enough to drown it."""
    size = plain.stream.shape[-1]
    direction = np.asarray(np.random.default_rng(0).standard_normal((size,)), np.float32)
    length = 0.5 * float(np.median(np.linalg.norm(plain.stream[layer], axis=-1)))
    return direction * np.float32(length / float(np.linalg.norm(direction)))


def _require_right_steering(
    facts: EngineFacts, plain: _Run, steered: _Run, vector: npt.NDArray[np.float32], *, layer: int, first: int
) -> None:
    rows = slice(0, _PROMPT_TOKENS)
    expected = plain.stream[:, rows].copy()
    expected[layer, first:] += vector
    # Above the steered layer, only what comes before the first steered position is known.
    for index in range(facts.n_layers):
        known = slice(0, _PROMPT_TOKENS if index <= layer else first)
        error = np.linalg.norm(steered.stream[index, known] - expected[index, known], axis=-1)
        scale = np.linalg.norm(expected[index, known], axis=-1)
        worst = float((error / scale).max())
        if not worst <= _STREAM_TOLERANCE[facts.dtype]:
            raise EngineRefused(f"steering did not change the residual stream as it should: off by {worst:.3g}")
    if layer + 1 < facts.n_layers and np.allclose(steered.stream[layer + 1, first], plain.stream[layer + 1, first]):
        raise EngineRefused("steering did not reach the layer after the steered one")
