"""Captures of other architectures, which hand the residual stream on in other ways than a Llama."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.inference.engine.architectures import ARCHITECTURES, find_blocks, make_tiny_architecture
from tests.inference.engine.conftest import prepare_once
from tests.inference.engine.reference import Float32Array
from tests.inference.engine.requests import ALL_LAYERS, make_prompt

pytestmark = pytest.mark.long
PROMPT = make_prompt(50, seed=1)


def read_with_huggingface(folder: Path, name: str) -> Float32Array:
    """Return what each block of the model gives, [layers, tokens, hidden]; runs apart from vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny_architecture(folder, name), dtype=torch.float32).eval()
    rows: list[torch.Tensor] = []
    for block in find_blocks(model, name):
        block.register_forward_hook(
            lambda _module, _inputs, output: rows.append((output[0] if isinstance(output, tuple) else output)[0])
        )
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    stream: Float32Array = torch.stack(rows).numpy()
    return stream


def read_with_the_engine(folders: dict[str, Path]) -> dict[str, Float32Array]:
    """Return what a harvest engine of each model captures; an engine that fails its self-test raises."""
    prepare_once()
    from inference.engine.harvest import HarvestEngine
    from inference.wire import EngineOptions

    streams = {}
    for name, folder in folders.items():
        options = EngineOptions(checkpoint=str(folder), dtype="float32", kv_cache_bytes=16 * 1024**2, max_num_seqs=8)
        engine = HarvestEngine.start(options, name="tests-architectures")
        try:
            (captured,) = engine.capture([(0, PROMPT)], ALL_LAYERS)
            streams[name] = captured.array.astype(np.float32)
        finally:
            engine.shutdown()
    return streams


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Float32Array, Float32Array]]:
    """Return what HuggingFace and what the engine read of each architecture."""
    root = tmp_path_factory.mktemp("architectures")
    folders = {name: root / model_type for name, (model_type, _, _) in ARCHITECTURES.items()}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        expected = {name: pool.submit(read_with_huggingface, folder, name).result() for name, folder in folders.items()}
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        captured = pool.submit(read_with_the_engine, folders).result()
    return {name: (expected[name], captured[name]) for name in folders}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stream_is_that_of_huggingface(streams: dict[str, tuple[Float32Array, Float32Array]], name: str) -> None:
    expected, captured = streams[name]
    assert captured.shape == expected.shape == (4, len(PROMPT), 64)
    error = np.linalg.norm(captured - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= 1e-5
