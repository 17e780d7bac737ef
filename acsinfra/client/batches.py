"""The tokens of a layer in shuffled batches, for training on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from acsinfra.client.errors import invalid_argument
from acsinfra.client.tensors import BFLOAT16

if TYPE_CHECKING:
    from acsinfra.client.folder import Harvest

DEFAULT_BUFFER: Final = 65_536


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one layer: `values` [batch, hidden], and of each its id, its prompt in the corpus and its position."""

    values: npt.NDArray[Any]
    token_ids: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.token_ids)

    def torch(self) -> dict[str, Any]:
        """The four as torch tensors that share their memory; bfloat16 stays bfloat16."""
        from acsinfra.client.torch_data import to_torch

        return {name: to_torch(array) for name, array in vars(self).items()}

    def take(self, order: npt.NDArray[np.int64]) -> "TokenBatch":
        """The tokens at these places, copied."""
        return TokenBatch(*(_take(array, order) for array in vars(self).values()))


def token_batches(
    harvest: "Harvest",
    *,
    layer: int,
    batch_size: int,
    seed: int,
    shuffle_buffer: int,
    skip_first: int,
    dtype: npt.DTypeLike,
    drop_last: bool,
    rows: Sequence[int] | npt.NDArray[np.int64] | None,
) -> Iterator[TokenBatch]:
    """See `Harvest.token_batches`. The arguments are checked now, not at the first batch. Raises AcsError."""
    if batch_size < 1 or shuffle_buffer < 0 or skip_first < 0:
        raise invalid_argument("batch_size is 1 at least; shuffle_buffer and skip_first are not negative.")
    view = harvest.layer(layer)
    random = np.random.default_rng(seed)
    order = np.arange(len(harvest)) if rows is None else np.asarray(rows, dtype=np.int64)
    if shuffle_buffer:
        order = random.permutation(order)

    def tokens_of_prompts() -> Iterator[TokenBatch]:
        for row in order:
            prompt = harvest[int(row)]
            values = prompt.layer(view.layer)[skip_first:]
            n_tokens = len(values)
            yield TokenBatch(
                values if dtype is None else values.astype(dtype),
                prompt.token_ids[skip_first:],
                np.full(n_tokens, prompt.index, dtype=np.int64),
                np.arange(skip_first, skip_first + n_tokens, dtype=np.int32),
            )

    return _batches(tokens_of_prompts(), batch_size, shuffle_buffer, random, drop_last=drop_last)


def _batches(
    prompts: Iterator[TokenBatch], batch_size: int, shuffle_buffer: int, random: np.random.Generator, *, drop_last: bool
) -> Iterator[TokenBatch]:
    """Fill a buffer, give out half of it in a random order, fill it again: each token moves in memory twice or so."""
    capacity = max(shuffle_buffer, 2 * batch_size)
    waiting: list[TokenBatch] = []
    n_waiting, is_over = 0, False
    while not is_over:
        while n_waiting < capacity and not is_over:
            prompt = next(prompts, None)
            is_over = prompt is None
            if prompt is not None and len(prompt):
                waiting.append(prompt)
                n_waiting += len(prompt)
        if not n_waiting:
            return
        buffer = _join(waiting)
        order = random.permutation(n_waiting) if shuffle_buffer else np.arange(n_waiting)
        n_out = n_waiting if is_over else n_waiting // 2 // batch_size * batch_size
        for start in range(0, n_out, batch_size):
            batch = buffer.take(order[start : min(start + batch_size, n_out)])
            if len(batch) == batch_size or not drop_last:
                yield batch
        waiting = [buffer.take(order[n_out:])]
        n_waiting -= n_out


def _take(array: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    # As bits: NumPy moves a dtype that is not its own, such as bfloat16, one value at a time (8 times slower).
    bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    return np.take(bits, order, axis=0).view(array.dtype)


def _join(parts: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        *(np.concatenate(arrays) for arrays in zip(*(vars(part).values() for part in parts), strict=True))
    )
