"""The start self-test: an engine whose captures or steering are wrong in any way does not serve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from inference.engine.activations import CapturedActivations
from inference.engine.errors import EngineRefused
from inference.wire import EngineDelta, EngineOptions, EngineRequest, SteeringVector
from tests.inference.engine.conftest import EngineThread, prepare_once

Answer = tuple[list[EngineDelta], CapturedActivations | None]
Spoil = Callable[[np.ndarray], np.ndarray]


class SpoiltEngine:
    """A real engine, with one thing on the way made wrong."""

    def __init__(
        self,
        engine: EngineThread,
        *,
        spoil_rows: Spoil | None = None,
        spoil_steering: Callable[[SteeringVector], SteeringVector] | None = None,
        answers: dict[str, Any] | None = None,
    ) -> None:
        self._engine = engine.engine
        self._spoil_rows = spoil_rows
        self._spoil_steering = spoil_steering
        self._answers = answers or {}
        self.facts = engine.engine.facts

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        answers = await self._engine.call_workers(method, *arguments)
        return [self._answers[method]] if method in self._answers else answers

    async def answer(self, request: EngineRequest) -> Answer:
        if self._spoil_steering is not None and request.steering:
            request = msgspec.structs.replace(
                request, steering=tuple(self._spoil_steering(vector) for vector in request.steering)
            )
        deltas, captured = await self._engine.answer(request)
        if captured is not None and self._spoil_rows is not None:
            captured = CapturedActivations(captured.layers, captured.dtype, self._spoil_rows(captured.array))
        return deltas, captured


def run_self_test(engine: EngineThread, **spoilt: Any) -> None:
    from inference.engine.self_test import run_self_test

    engine.run(run_self_test(SpoiltEngine(engine, **spoilt)))


def test_a_sound_engine_passes(roomy: EngineThread) -> None:
    run_self_test(roomy)


SPOILERS: dict[str, Spoil] = {
    "the layer before": lambda rows: np.concatenate([rows[:1], rows[:-1]]),
    "rows one late": lambda rows: np.roll(rows, 1, axis=1),
    "a little too large": lambda rows: rows + np.float32(0.01),
    "not finite": lambda rows: np.where(np.arange(rows.shape[-1]) == 3, np.float32(np.nan), rows).astype(np.float32),
    "a row too few": lambda rows: rows[:, :-1],
}


@pytest.mark.parametrize("name", SPOILERS)
def test_wrong_rows_are_found(roomy: EngineThread, name: str) -> None:
    with pytest.raises(EngineRefused):
        run_self_test(roomy, spoil_rows=SPOILERS[name])


STEERING_SPOILERS: dict[str, Callable[[SteeringVector], SteeringVector]] = {
    "not applied": lambda vector: msgspec.structs.replace(vector, scale=0.0),
    "twice as strong": lambda vector: msgspec.structs.replace(vector, scale=2.0),
    "another layer": lambda vector: msgspec.structs.replace(vector, layer_indices=(1,)),
    "everywhere": lambda vector: msgspec.structs.replace(vector, position_spans=None),
}


@pytest.mark.parametrize("name", STEERING_SPOILERS)
def test_wrong_steering_is_found(roomy: EngineThread, name: str) -> None:
    with pytest.raises(EngineRefused, match="steering"):
        run_self_test(roomy, spoil_steering=STEERING_SPOILERS[name])


def test_an_unknown_stream_is_refused_with_a_sentence(roomy: EngineThread) -> None:
    unknown = {"settle_stream_kind": {"kind": "", "errors": {"sum": 0.3, "first": 0.9}}}
    with pytest.raises(EngineRefused, match=r"could not be decided: \{'sum': 0.3"):
        run_self_test(roomy, answers=unknown)


def test_which_tensor_is_the_stream_is_decided_by_the_final_norm(roomy: EngineThread) -> None:
    """The tiny Llama's blocks give (delta, residual): the sum is right, the delta alone far off."""
    from inference.engine.self_test import _make_request

    async def settle() -> list[dict[str, Any]]:
        await roomy.engine.call_workers("arm_stream_check")
        await roomy.engine.answer(_make_request(roomy.engine.facts, "plain", capture=False, steering=()))
        return await roomy.engine.call_workers("settle_stream_kind")

    (settled,) = roomy.run(settle())
    assert settled["kind"] == "sum"
    assert settled["errors"]["sum"] < 1e-5
    assert settled["errors"]["first"] > 0.1


@pytest.mark.parametrize(
    ("extra_args", "sentence"),
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline parallelism"),
        ({"enforce_eager": False}, "torch.compile"),
        ({"enable_lora": True}, "LoRA"),
        ({"ubatch_size": 2}, "vLLM refuses"),
        ({"max_model_len": 4096}, "vLLM refuses"),
        ({"no_such_argument": 1}, "vLLM refuses"),
    ],
)
def test_what_is_not_proven_is_refused_at_start(
    tiny_float32: Path, extra_args: dict[str, bool | int | float | str], sentence: str
) -> None:
    prepare_once()
    from inference.engine.arguments import make_vllm_config

    with pytest.raises(EngineRefused, match=sentence):
        make_vllm_config(EngineOptions(checkpoint=str(tiny_float32), dtype="float32", extra_args=extra_args))


def test_speculative_decoding_and_deepseek_in_float16_are_refused(tiny_float32: Path) -> None:
    """Neither can be made of a tiny Llama: the configuration is changed after vLLM made it."""
    prepare_once()
    import torch

    from inference.engine.arguments import make_vllm_config, refuse_unproven

    config = make_vllm_config(EngineOptions(checkpoint=str(tiny_float32), dtype="float32"))
    refuse_unproven(config)
    config.speculative_config = object()
    with pytest.raises(EngineRefused, match="speculative decoding"):
        refuse_unproven(config)
    config.speculative_config = None
    config.model_config.dtype = torch.float16
    refuse_unproven(config)
    config.model_config.model_arch_config.architectures = ["DeepseekV3ForCausalLM"]
    with pytest.raises(EngineRefused, match="DeepSeek in float16"):
        refuse_unproven(config)


def test_decoder_layers_are_found_or_refused() -> None:
    prepare_once()
    from torch import nn

    from inference.engine.decoder_layers import find_decoder_layers

    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"layers": blocks, "experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
    assert find_decoder_layers(model, 3) is blocks
    model["again"] = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    with pytest.raises(LookupError, match="no unique list of 3"):
        find_decoder_layers(model, 3)
    with pytest.raises(LookupError, match="no unique list of 4"):
        find_decoder_layers(model, 4)


def test_a_stream_that_vllm_scales_in_float16_is_refused() -> None:
    prepare_once()
    import torch
    from torch import nn

    from inference.engine.decoder_layers import require_unscaled_stream

    class Block(nn.Linear):
        __module__ = "vllm.model_executor.models.deepseek_v2"

    class FineTunedBlock(Block):
        __module__ = "somebody.model"

    for kind in (Block, FineTunedBlock):
        blocks = nn.ModuleList([nn.Linear(2, 2), kind(2, 2)])
        require_unscaled_stream(blocks, torch.bfloat16)
        with pytest.raises(LookupError, match="scales its residual stream in float16; serve it in bfloat16"):
            require_unscaled_stream(blocks, torch.float16)


def test_a_step_is_short_however_long_a_prompt_is(tiny_float32: Path) -> None:
    """What a cancelled or stopped harvest waits for at most: the end of one step."""
    prepare_once()
    from vllm.platforms import current_platform

    from inference.engine.arguments import make_vllm_config

    def step_tokens(max_num_seqs: int = 256, **extra_args: Any) -> int:
        options = EngineOptions(
            checkpoint=str(tiny_float32), dtype="float32", max_num_seqs=max_num_seqs, extra_args=extra_args
        )
        scheduler = make_vllm_config(options).scheduler_config
        assert scheduler.enable_chunked_prefill == extra_args.get("enable_chunked_prefill", True)
        tokens: int = scheduler.max_num_batched_tokens
        return tokens

    assert step_tokens() <= 8192
    if current_platform.is_cpu():
        assert step_tokens() == 1024
        assert step_tokens(max_num_seqs=1500) == 1500
        assert step_tokens(enable_chunked_prefill=False) >= 512
        assert step_tokens(enable_chunked_prefill=False, max_num_batched_tokens=600) == 600
    assert step_tokens(max_num_batched_tokens=300) == 300
