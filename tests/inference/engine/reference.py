"""HuggingFace's answer to what the engine should have captured, computed in a process of its own.

It runs apart from vLLM, which patches HuggingFace's classes where both are imported.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceSteering:
    """One steering vector, spelled out: `rows[layer][position]` is what stands for it there, before the scale."""

    rows: dict[int, dict[int, Float32Array]]
    scale: float = 1.0
    norm_match: bool = False


@dataclass(frozen=True)
class Reference:
    """`stream` is [layers, tokens, hidden] after each block, steering included; `logprobs` is [tokens, vocabulary]."""

    stream: Float32Array
    logprobs: Float32Array


class _Process:
    """The process that has HuggingFace: one for all who want it at the same time, since it imports for seconds."""

    def __init__(self) -> None:
        self._users = 0
        self._pool: ProcessPoolExecutor | None = None

    @contextmanager
    def wanted(self) -> Iterator[ProcessPoolExecutor]:
        """Keep the process until the last of those blocks ends."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._users += 1
        try:
            yield self._pool
        finally:
            self._users -= 1
            if not self._users:
                self._pool.shutdown()
                self._pool = None


_process = _Process()


def run_with_huggingface[Result](calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Make these calls, which can be pickled, one after the other where HuggingFace is and vLLM is not."""
    with _process.wanted() as pool:
        return [pool.submit(call).result() for call in calls]


class ReferenceModel:
    """A checkpoint in HuggingFace, in another process."""

    def __init__(self, folder: Path, *, dtype: Literal["float32", "float64", "bfloat16"] = "float32") -> None:
        self._folder, self._dtype = folder, dtype
        self._open = ExitStack()

    def read(self, token_ids: Sequence[int], steering: Sequence[ReferenceSteering] = ()) -> Reference:
        """Return the residual stream and the logprobs of a sequence of token ids."""
        return self._pool.submit(_read, self._folder, self._dtype, tuple(token_ids), tuple(steering)).result()

    def __enter__(self) -> Self:
        self._pool = self._open.enter_context(_process.wanted())
        return self

    def __exit__(self, *_exception: object) -> None:
        self._open.close()


@cache
def _load(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _read(folder: Path, dtype: str, token_ids: tuple[int, ...], steering: tuple[ReferenceSteering, ...]) -> Reference:
    import torch

    model = _load(folder, dtype)
    stream: list[Any] = []

    def steer_and_keep(layer: int, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        unsteered = hidden.clone()
        for vector in steering:
            for position, row in vector.rows.get(layer, {}).items():
                if position >= hidden.shape[1]:
                    continue
                amount = torch.from_numpy(row).to(hidden.dtype) * vector.scale
                if vector.norm_match:
                    amount = amount * unsteered[0, position].norm() / torch.from_numpy(row).to(hidden.dtype).norm()
                hidden[0, position] += amount
        stream.append(hidden[0].clone())
        return output

    hooks = [
        block.register_forward_hook(lambda _module, _inputs, output, layer=layer: steer_and_keep(layer, output))
        for layer, block in enumerate(model.model.layers)
    ]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Reference(torch.stack(stream).float().numpy(), torch.log_softmax(logits.float(), dim=-1).numpy())
