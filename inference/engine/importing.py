"""Imports of thousands of modules, done in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# What an engine's process imports until it serves.
ENGINE_IMPORTS: Final = ("vllm.v1.engine.core", "vllm.model_executor.models.llama", "inference.engine.worker")


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector still in the block.

    What an import makes stays: going through it again and again takes a tenth of the CPU that importing vLLM takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
