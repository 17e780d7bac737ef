"""The custom op behind every decoder block: where the residual stream is read and changed.

Each block's forward becomes itself and one call of `acsinfra::tap_residual_stream`, an opaque op that changes its
tensors in place. Eager execution, torch.compile and graphs so run the same op; forward hooks, registered after
start, fire 0 times under the latter two (vLLM 0.32). It must be installed when the model is loaded, before anything
compiles.
"""

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

type BlockOutput = torch.Tensor | tuple[Any, ...]


class StreamListener(Protocol):
    """What the tap calls after each block."""

    @property
    def is_idle(self) -> bool:
        """Whether the coming calls of `on_block` would do nothing."""

    def on_block(self, layer: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        """Read or change in place what block `layer` gave: its first tensor and, where there is one, its second."""


# Each lives as long as the blocks that tell it, so that an engine that was freed leaves nothing here.
_listeners: WeakValueDictionary[int, StreamListener] = WeakValueDictionary()
_keys = itertools.count()
_library = torch.library.Library("acsinfra", "DEF")
_library.define("tap_residual_stream(Tensor(a!) first, Tensor(b!)? second, int layer, int listener) -> ()")


def _tap(first: torch.Tensor, second: torch.Tensor | None, layer: int, listener: int) -> None:
    _listeners[listener].on_block(layer, first, second)


def _tap_without_data(first: torch.Tensor, second: torch.Tensor | None, layer: int, listener: int) -> None:
    """Nothing to infer: the op returns nothing."""


_library.impl("tap_residual_stream", _tap, "CompositeExplicitAutograd")
_library.impl("tap_residual_stream", _tap_without_data, "Meta")


def install_taps(layers: nn.ModuleList, listener: StreamListener) -> None:
    """Make every block of `layers` call `listener.on_block` with its index after its own forward."""
    key = next(_keys)
    _listeners[key] = listener
    for index, block in enumerate(layers):
        block.forward = _tapped(block.forward, index, key, listener)


def _tapped(
    forward: Callable[..., BlockOutput], layer: int, key: int, listener: StreamListener
) -> Callable[..., BlockOutput]:
    def forward_and_tap(*args: Any, **kwargs: Any) -> BlockOutput:
        output = forward(*args, **kwargs)
        # Under torch.compile the op has to be in the graph whatever this step wants; eager execution can skip it.
        if not torch.compiler.is_compiling() and listener.is_idle:
            return output
        first, second = split_block_output(output)
        torch.ops.acsinfra.tap_residual_stream(first, second, layer, key)
        return output

    return forward_and_tap


def split_block_output(output: BlockOutput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's first tensor, and its second where that has the same shape."""
    if isinstance(output, torch.Tensor):
        return output, None
    first = output[0]
    second = output[1] if len(output) > 1 else None
    if isinstance(second, torch.Tensor) and second.shape == first.shape:
        return first, second
    return first, None
