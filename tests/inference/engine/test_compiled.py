"""The harvest engine with the tap inside torch.compile's graph: the same streams, from one start."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from django.test import override_settings

from harvest.runner.lives import PromptsInFlight, RunnerLife
from harvest.runner.worker import Runner
from inference.models import BaseModel
from tests.inference.engine import conftest
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import ALL_LAYERS, assert_projected, assert_same_stream, make_prompt

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine


@pytest.fixture(scope="module")
def runner(tiny_float32: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a runner that compiles for jobs of 100 tokens or more, with chunks of 128 tokens; nothing is loaded."""
    conftest.prepare_once()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    model = BaseModel(
        name="tests-compiled",
        activation_dtype="float32",
        context_length=512,
        kv_cache_bytes=48 * conftest.BLOCK_TOKENS * conftest.CACHE_BYTES_PER_TOKEN,
        max_num_seqs=32,
        extra_args={"max_num_batched_tokens": 128},
    )
    runner = Runner(
        model=model,
        checkpoint=str(tiny_float32),
        is_stopping=lambda: False,
        end_process=lambda: pytest.fail("the engine died"),
        life=RunnerLife(PromptsInFlight(1)),
    )
    with override_settings(HARVEST_COMPILE_TOKENS=100):
        yield runner
    runner.shut_down()
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.fixture
def compiled(runner: Runner) -> "HarvestEngine":
    """Return the runner's compiled engine."""
    return runner._loaded_engine(100)


def test_a_long_job_has_its_runner_compile_and_short_ones_use_what_is_there(runner: Runner) -> None:
    eager = runner._loaded_engine(99)
    assert not eager.is_compiled
    assert runner._loaded_engine(1) is eager
    compiled = runner._loaded_engine(100)
    assert compiled.is_compiled
    assert runner._loaded_engine(99) is compiled


def test_a_compiled_engine_reads_the_same_streams(compiled: "HarvestEngine", reference: ReferenceModel) -> None:
    from vllm.compilation.counter import compilation_counter

    assert compilation_counter.num_models_seen > 0, "this engine is compiled"
    lengths = [1, 2, 511, 64, 33, 128, 300, 7, 200]
    prompts = [(10 * index, make_prompt(length, seed=index)) for index, length in enumerate(lengths)]
    for layers in (ALL_LAYERS, (2,)):
        captured = {one.index: one for one in compiled.capture(prompts, layers)}
        assert sorted(captured) == [index for index, _ in prompts]
        for index, token_ids in prompts:
            assert_same_stream(captured[index].array.astype(np.float32), reference.read(token_ids), layers=layers)


def test_a_compiled_engine_projects(compiled: "HarvestEngine") -> None:
    prompts = [(0, make_prompt(140)), (1, make_prompt(30))]
    directions = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    whole = {one.index: one.array for one in compiled.capture(prompts, (1, 3))}
    for one in compiled.capture(prompts, (1, 3), directions=directions):
        assert_projected(one.array, whole[one.index], directions)
