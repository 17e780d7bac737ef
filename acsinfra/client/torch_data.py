"""Activations as torch tensors and Datasets. The only module here that imports torch, and it is imported last."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from acsinfra.client.tensors import BFLOAT16

if TYPE_CHECKING:
    from acsinfra.client.folder import Harvest


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as a tensor of its dtype, bfloat16 included; one that may be written shares its memory."""
    if not array.flags.writeable:
        # torch has no read-only tensors, and a write into the map of a file would end the process.
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array; torch's bfloat16 becomes `ml_dtypes.bfloat16`."""
    whole = tensor.detach().cpu().contiguous()
    array: npt.NDArray[Any] = whole.view(torch.int16).numpy() if whole.dtype == torch.bfloat16 else whole.numpy()
    return array.view(BFLOAT16) if whole.dtype == torch.bfloat16 else array


class TokenDataset(IterableDataset):
    """`Harvest.token_batches` for a DataLoader: whole batches, so give the DataLoader `batch_size=None`.

    With `num_workers` each worker reads its share of the prompts. `set_epoch(n)` before an epoch shuffles anew.
    Batches are dicts of tensors: `values` [batch, hidden], `token_ids`, `prompts`, `positions`.
    """

    def __init__(self, harvest: "Harvest", *, layer: int, batch_size: int, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self._harvest = harvest
        self._options = {"layer": layer, "batch_size": batch_size, **options}
        self._seed = seed
        self._epoch = 0
        # What is wrong with the options is said now.
        harvest.token_batches(**self._options, seed=seed)

    def set_epoch(self, epoch: int) -> None:
        """Give the next iteration another order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        number, n_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = np.arange(number, len(self._harvest), n_workers)
        seed = hash((self._seed, self._epoch, number)) % 2**63
        for batch in self._harvest.token_batches(**self._options, seed=seed, rows=rows):
            yield batch.torch()


class PromptDataset(Dataset):
    """A prompt an item: `values` [layers, tokens, hidden], `token_ids` [tokens], and its `index` in the corpus."""

    def __init__(self, harvest: "Harvest") -> None:
        self._harvest = harvest

    def __len__(self) -> int:
        return len(self._harvest)

    def __getitem__(self, place: int) -> dict[str, Any]:
        prompt = self._harvest[place]
        return {"values": to_torch(prompt.values), "token_ids": to_torch(prompt.token_ids), "index": prompt.index}
