"""Engines for these tests: real ones over the tiny model, each shared by as many tests as can share it."""

import asyncio
import multiprocessing
import sys
import threading
from collections.abc import Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inference.engine.environment import prepare_environment
from inference.engine.fork_server import start_fork_server
from inference.wire import EngineOptions, EngineRequest
from tests.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from inference.engine.activations import CapturedActivations
    from inference.engine.harvest import HarvestEngine
    from inference.wire import EngineDelta

# One token of the tiny model's cache: 4 layers of keys and values, 64 float32 each.
CACHE_BYTES_PER_TOKEN = 4 * 2 * 64 * 4
BLOCK_TOKENS = 32
START_SECONDS = 900.0


@cache
def prepare_once() -> None:
    """Prepare this process for engines. One that comes from the fork server has what that one was prepared with."""
    if multiprocessing.parent_process() is None or "vllm" not in sys.modules:
        prepare_environment(checkpoint=".", tensor_parallel_size=1, shares_machine=True)


class EngineThread:
    """An `InferenceEngine` on an event loop in a thread of its own, as an inference worker has it."""

    def __init__(self, options: EngineOptions, *, name: str) -> None:
        prepare_once()
        start_fork_server()
        from inference.engine.front import InferenceEngine

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.engine: InferenceEngine = self.run(InferenceEngine.start(options, name=name), timeout=START_SECONDS)
        except BaseException:
            self._stop_loop()
            raise

    def run[Result](self, work: Coroutine[Any, Any, Result], *, timeout: float = 120.0) -> Result:
        """Run a coroutine on the engine's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def answer(self, request: EngineRequest) -> "tuple[list[EngineDelta], CapturedActivations | None]":
        """Run one request to its end."""
        return self.run(self.engine.answer(request))

    def answer_all(
        self, requests: list[EngineRequest]
    ) -> "list[tuple[list[EngineDelta], CapturedActivations | None] | BaseException]":
        """Run many requests at once; a failed one gives its exception."""

        async def gather() -> "list[tuple[list[EngineDelta], CapturedActivations | None] | BaseException]":
            return await asyncio.gather(*(self.engine.answer(one) for one in requests), return_exceptions=True)

        return self.run(gather())

    def describe_workers(self) -> list[dict[str, Any]]:
        """What each worker rank holds at present."""
        return self.run(self.engine.call_workers("describe_stream"))

    def close(self) -> None:
        """End the engine and the loop."""
        self.run(self.engine.shutdown())
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


@pytest.fixture(scope="session")
def tiny_float32(tiny_model: Path) -> Path:
    """Return the folder of the tiny model in float32."""
    return tiny_model


@pytest.fixture(scope="session")
def tiny_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model in bfloat16: the same weights, rounded."""
    return make_tiny_model(tmp_path_factory.mktemp("engine-models") / "bfloat16", dtype="bfloat16")


@pytest.fixture(scope="package")
def roomy(tiny_float32: Path) -> Iterator[EngineThread]:
    """Return an engine with room: prompts in one piece, no preemption, prefix cache on."""
    engine = EngineThread(
        EngineOptions(checkpoint=str(tiny_float32), dtype="float32", kv_cache_bytes=64 * 1024**2, max_num_seqs=64),
        name="tests-roomy",
    )
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def cramped(tiny_float32: Path) -> Iterator[EngineThread]:
    """Return an engine in trouble: chunks of 32 tokens, a cache of 24 blocks that forces preemption, prefix cache."""
    engine = EngineThread(
        EngineOptions(
            checkpoint=str(tiny_float32),
            dtype="float32",
            kv_cache_bytes=24 * BLOCK_TOKENS * CACHE_BYTES_PER_TOKEN,
            max_num_seqs=16,
            extra_args={"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "enable_prefix_caching": True},
        ),
        name="tests-cramped",
    )
    yield engine
    engine.close()


# A process has one engine at a time: what ends it ends torch's process groups, which all would share.
@pytest.fixture(scope="module")
def harvest(tiny_float32: Path) -> Iterator["HarvestEngine"]:
    """Return a harvest engine in this process, with chunks of 128 tokens and a cache for three long prompts."""
    prepare_once()
    from inference.engine.harvest import HarvestEngine

    engine = HarvestEngine.start(
        EngineOptions(
            checkpoint=str(tiny_float32),
            dtype="float32",
            kv_cache_bytes=48 * BLOCK_TOKENS * CACHE_BYTES_PER_TOKEN,
            max_num_seqs=32,
            extra_args={"max_num_batched_tokens": 128},
        ),
        name="tests-harvest",
    )
    yield engine
    engine.shutdown()
