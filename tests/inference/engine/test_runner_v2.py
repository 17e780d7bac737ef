"""vLLM's Runner V2, the default on GPUs, on the CPU: its kernels run in Triton's interpreter."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.inference.engine.architectures import run_apart
from tests.inference.engine.conftest import BLOCK_TOKENS, CACHE_BYTES_PER_TOKEN, prepare_once
from tests.inference.engine.reference import Float32Array, ReferenceModel
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    assert_same_stream,
    make_prompt,
    make_request,
    make_values,
    make_vector,
    spell_out,
)

PROMPTS = [make_prompt(length, seed=length) for length in (150, 1, 200, 33, 180, 160, 64, 190)]
STEERED = make_request(
    make_prompt(70, seed=7),
    capture=ALL_LAYERS,
    steering=(make_vector(make_values(1, HIDDEN, seed=9), (1,), position_spans=((30, 68),)),),
    max_tokens=1,
)


@dataclass(frozen=True)
class WhatV2Read:
    runner: str
    preemptions: int
    streams: dict[int, Float32Array]
    steered: Float32Array


def read_with_runner_v2(folder: Path) -> WhatV2Read:
    """Read the prompts in chunks, eight at once in a cache that holds half of them; runs in a process of its own."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    # vLLM's CPU build takes Triton only with a backend of this name; the interpreter asks nothing of it.
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=_NoDriver)
    prepare_once()
    from inference.engine.harvest import HarvestEngine, _drive
    from inference.wire import EngineOptions

    options = EngineOptions(
        checkpoint=str(folder),
        dtype="float32",
        kv_cache_bytes=18 * BLOCK_TOKENS * CACHE_BYTES_PER_TOKEN,
        max_num_seqs=8,
        extra_args={
            "max_num_batched_tokens": 128,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": 32,
        },
    )
    engine = HarvestEngine.start(options, name="tests-runner-v2")
    steered: list[Float32Array] = []

    async def answer() -> None:
        _, activations = await engine.answer(STEERED)
        assert activations is not None
        steered.append(activations.array.astype(np.float32))

    try:
        streams = {one.index: one.array.astype(np.float32) for one in engine.capture(enumerate(PROMPTS), ALL_LAYERS)}
        _drive(answer())
        (worker,) = engine.describe_workers()
        return WhatV2Read(worker["runner"], worker["preemptions"], streams, *steered)
    finally:
        engine.shutdown()


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return False


@pytest.fixture(scope="module")
def read(tiny_float32: Path) -> WhatV2Read:
    (read,) = run_apart([partial(read_with_runner_v2, tiny_float32)], with_vllm=False)
    if isinstance(read, Exception):
        raise read
    return read


def test_captures_are_exact_in_chunks_and_after_preemption(read: WhatV2Read, reference: ReferenceModel) -> None:
    assert read.runner == "v2"
    assert read.preemptions > 0
    assert sorted(read.streams) == list(range(len(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        assert_same_stream(read.streams[index], reference.read(prompt))


def test_steering_is_exact(read: WhatV2Read, reference: ReferenceModel) -> None:
    prompt = STEERED.prompt_token_ids
    expected = reference.read(prompt, [spell_out(vector, len(prompt)) for vector in STEERED.steering])
    assert_same_stream(read.steered, expected)
