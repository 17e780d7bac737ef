"""A harvest on the disk, opened: nothing is read before it is looked at, and nothing is copied that need not be."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import numpy.typing as npt

from acsinfra.client.batches import DEFAULT_BUFFER, TokenBatch, token_batches
from acsinfra.client.downloads import file_sha256
from acsinfra.client.errors import CORRUPTED_DOWNLOAD, HARVEST_INCOMPLETE, AcsError, invalid_argument
from acsinfra.client.job_files import MANIFEST, STATISTICS
from acsinfra.client.run_state import FILE_NAME, load_state
from acsinfra.client.shards import open_tensors

if TYPE_CHECKING:
    from acsinfra.client.torch_data import PromptDataset, TokenDataset

type Array = npt.NDArray[Any]
type FloatArray = npt.NDArray[np.float64]
type IntArray = npt.NDArray[np.int64]

# A map keeps a file open: far fewer than a process may have open.
MAPS_KEPT: Final = 128
HASH_CHUNK_BYTES: Final = 4 * 1024 * 1024


@lru_cache(maxsize=MAPS_KEPT)
def _tensors(path: Path, _modified_ns: int) -> Mapping[str, Array]:
    return open_tensors(path)


@dataclass(frozen=True)
class PromptActivations:
    """What the model read of one prompt, and what it thought: `values` [layers, tokens, hidden], or [.., directions].

    `values` and `token_ids` (int32 [tokens]) are read-only views of the file. `index` is the prompt's place in the
    corpus, `layers` are those of `values`, and `is_cut` says that the prompt was longer than the model's context.
    """

    index: int
    token_ids: npt.NDArray[np.int32]
    values: Array
    layers: tuple[int, ...]
    is_cut: bool

    def layer(self, layer: int) -> Array:
        """[tokens, hidden] of one layer of the model."""
        values: Array = self.values[_place(self.layers, layer)]
        return values


@dataclass(frozen=True)
class Statistics:
    """Over all tokens but start tokens: `mean` and `std` [layers, hidden], `mean_token_norm` [layers], `count`.

    Of the population, in float64, put together from the jobs' own.
    """

    mean: FloatArray
    std: FloatArray
    mean_token_norm: FloatArray
    count: int


@dataclass(frozen=True)
class _Job:
    folder: Path
    first: int
    manifest: Mapping[str, Any]


class Harvest(Sequence[PromptActivations]):
    """The activations of a corpus in a folder; `open_harvest` makes it. `harvest[i]` is prompt i of the corpus."""

    def __init__(self, folder: Path, jobs: Sequence[_Job]) -> None:
        self.folder = folder
        self._jobs = list(jobs)
        first = self._jobs[0].manifest
        self.model = str(first["model"])
        self.checkpoint = str(first["checkpoint"])
        self.contents = str(first["contents"])
        self.dtype = str(first["dtype"])
        self.layers: tuple[int, ...] = tuple(first["layer_indices"])
        self._index_prompts()

    def _index_prompts(self) -> None:
        """Note of each prompt its place in the corpus, job, shard, tokens and whether it was cut."""
        rows = [
            (job.first + prompt["index"], number, shard_number, prompt["shape"][1], prompt["cut"])
            for number, job in enumerate(self._jobs)
            for shard_number, shard in enumerate(job.manifest["shards"])
            for prompt in shard["prompts"]
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self.prompt_indexes: IntArray = table[:, 0].copy()
        self.token_counts: IntArray = table[:, 3].copy()
        self._places = table[:, [1, 2, 4]].copy()
        self._row_of = {int(index): row for row, index in enumerate(self.prompt_indexes)}
        self.width = int(self._jobs[0].manifest["shards"][0]["prompts"][0]["shape"][2])

    def __repr__(self) -> str:
        return (
            f"Harvest({str(self.folder)!r}: {self.contents} of {self.model}, layers {list(self.layers)}, "
            f"{len(self):,} prompts, {self.n_tokens:,} tokens)"
        )

    def __len__(self) -> int:
        return len(self.prompt_indexes)

    @property
    def n_tokens(self) -> int:
        """The tokens of all prompts."""
        return int(self.token_counts.sum())

    @property
    def shard_paths(self) -> list[Path]:
        """The shard files, in the order of the corpus."""
        return [job.folder / _file_name(shard) for job in self._jobs for shard in job.manifest["shards"]]

    # By prompt

    @overload
    def __getitem__(self, index: int) -> PromptActivations: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptActivations]: ...
    def __getitem__(self, index: int | slice) -> PromptActivations | list[PromptActivations]:
        if isinstance(index, slice):
            return [self._at(row) for row in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[PromptActivations]:
        return map(self._at, range(len(self)))

    def prompt(self, index: int) -> PromptActivations:
        """Prompt `index` of the corpus. Raises IndexError for one that is not here."""
        try:
            return self._at(self._row_of[index])
        except KeyError:
            raise IndexError(f"prompt {index} is not in {self.folder}") from None

    def _at(self, row: int) -> PromptActivations:
        job_number, shard_number, is_cut = self._places[row]
        job, index = self._jobs[job_number], int(self.prompt_indexes[row])
        path = job.folder / _file_name(job.manifest["shards"][shard_number])
        try:
            tensors = _tensors(path, path.stat().st_mtime_ns)
            token_ids, values = tensors[f"tokens_{index - job.first}"], tensors[f"prompt_{index - job.first}"]
        except FileNotFoundError:
            raise AcsError(f"{path} is missing: harvest into this folder again.", code=HARVEST_INCOMPLETE) from None
        except KeyError:
            raise AcsError(f"{path} has no prompt {index - job.first}.", code=CORRUPTED_DOWNLOAD) from None
        return PromptActivations(index, token_ids, values, self.layers, bool(is_cut))

    # By layer

    def layer(self, layer: int) -> "LayerView":
        """One layer of every prompt."""
        return LayerView(self, layer)

    def token_batches(
        self,
        *,
        layer: int,
        batch_size: int,
        seed: int = 0,
        shuffle_buffer: int = DEFAULT_BUFFER,
        skip_first: int = 0,
        dtype: npt.DTypeLike = None,
        drop_last: bool = False,
        rows: Sequence[int] | IntArray | None = None,
    ) -> Iterator[TokenBatch]:
        """Every token of a layer once, shuffled, in batches of `batch_size`: one epoch of training an SAE.

        Prompts come in an order of `seed`, and their tokens are mixed in a buffer of `shuffle_buffer` tokens, which is
        what it needs of memory: `shuffle_buffer` * hidden values. 0 keeps the order of the corpus. `skip_first` leaves
        out that many tokens of each prompt (1: its start token, whose norm is an outlier); `dtype` converts
        (`np.float32`); `drop_last` leaves out a last batch that is not full; `rows` takes only some prompts, by their
        place in this harvest. The same arguments give the same batches. `batch.torch()` has them as torch tensors.
        """
        return token_batches(
            self,
            layer=layer,
            batch_size=batch_size,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            skip_first=skip_first,
            dtype=dtype,
            drop_last=drop_last,
            rows=rows,
        )

    # For torch

    def torch_dataset(self, *, layer: int, batch_size: int, **options: Any) -> "TokenDataset":
        """`token_batches` as an IterableDataset, for `DataLoader(dataset, batch_size=None, num_workers=…)`."""
        from acsinfra.client.torch_data import TokenDataset

        return TokenDataset(self, layer=layer, batch_size=batch_size, **options)

    def torch_prompts(self) -> "PromptDataset":
        """The prompts as a map-style Dataset of `{"values", "token_ids", "index"}`."""
        from acsinfra.client.torch_data import PromptDataset

        return PromptDataset(self)

    # Beside the values

    @cached_property
    def statistics(self) -> Statistics:
        """Each layer's mean and standard deviation over the whole corpus."""
        parts = []
        for job in self._jobs:
            path = job.folder / STATISTICS
            parts.append(_tensors(path, path.stat().st_mtime_ns))
        counts = np.array([int(part["count"][0]) for part in parts], dtype=np.float64)
        weights = counts / max(1.0, counts.sum())
        means = np.stack([part["mean"].astype(np.float64) for part in parts])
        variances = np.stack([part["std"].astype(np.float64) ** 2 for part in parts])
        norms = np.stack([part["mean_token_norm"].astype(np.float64) for part in parts])
        mean = np.tensordot(weights, means, 1)
        variance = np.tensordot(weights, variances + (means - mean) ** 2, 1)
        return Statistics(mean, np.sqrt(variance), np.tensordot(weights, norms, 1), int(counts.sum()))

    def verify(self) -> None:
        """Hash every file again. Raises AcsError (`corrupted_download`) for the first that is not what was written."""
        for job in self._jobs:
            entries = [(job.folder / _file_name(shard), shard) for shard in job.manifest["shards"]]
            for path, entry in [*entries, (job.folder / STATISTICS, job.manifest["stats"])]:
                if not path.exists():
                    raise AcsError(f"{path} is missing.", code=HARVEST_INCOMPLETE)
                if path.stat().st_size != entry["bytes"] or file_sha256(path) != entry["sha256"]:
                    raise AcsError(
                        f"{path} does not have the SHA-256 of the manifest: delete it and harvest here again.",
                        code=CORRUPTED_DOWNLOAD,
                    )


class LayerView(Sequence[Array]):
    """One layer of a harvest: `view[i]` is [tokens, hidden] of its prompt i, a read-only view of the file."""

    def __init__(self, harvest: Harvest, layer: int) -> None:
        self._harvest = harvest
        self._place = _place(harvest.layers, layer)
        self.layer = layer

    def __len__(self) -> int:
        return len(self._harvest)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        if isinstance(index, slice):
            return [prompt.values[self._place] for prompt in self._harvest[index]]
        values: Array = self._harvest[index].values[self._place]
        return values

    def numpy(self, dtype: npt.DTypeLike = None) -> Array:
        """[tokens of all prompts, hidden], read into memory."""
        parts = [prompt.values[self._place] for prompt in self._harvest]
        whole: Array = np.concatenate(parts)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def torch(self) -> Any:
        """`numpy()` as a torch tensor, bfloat16 where the files are."""
        from acsinfra.client.torch_data import to_torch

        return to_torch(self.numpy())

    def token_ids(self) -> npt.NDArray[np.int32]:
        """[tokens of all prompts]: the id beside each row of `numpy()`."""
        return np.concatenate([prompt.token_ids for prompt in self._harvest])


def open_harvest(folder: str | Path, *, allow_partial: bool = False) -> Harvest:
    """Open what `acs harvest` or `Client.harvest` wrote, or the downloaded files of one job beside their manifest.

    `allow_partial` opens what is there of a harvest that is not whole. Raises AcsError (`harvest_incomplete`).
    """
    root = Path(folder)
    state = load_state(root)
    if state is None:
        if not (root / MANIFEST).exists():
            raise invalid_argument(f"{root} holds no harvest: neither {FILE_NAME} nor {MANIFEST} is there.")
        return Harvest(root, [_Job(root, 0, _read_manifest(root))])
    parts = [part for part in state.parts if (root / part.folder_name / MANIFEST).exists()]
    if not parts or (len(parts) < len(state.parts) and not allow_partial):
        raise AcsError(
            f"{len(state.parts) - len(parts)} of {len(state.parts)} jobs of {root} are not there yet: harvest into it "
            "again to go on" + ("." if not parts else ", or open it with allow_partial=True."),
            code=HARVEST_INCOMPLETE,
        )
    folders = [(root / part.folder_name, part.first) for part in parts]
    return Harvest(root, [_Job(folder, first, _read_manifest(folder)) for folder, first in folders])


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_bytes())
        if manifest["layout_version"] != 1 or not manifest["shards"]:
            raise ValueError(f"its layout is version {manifest['layout_version']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AcsError(f"{path} cannot be read: {error}", code=CORRUPTED_DOWNLOAD) from error
    return manifest


def has_every_file(folder: Path) -> bool:
    """Whether a job's folder has its manifest and every file in it, by their sizes."""
    try:
        manifest = _read_manifest(folder)
        sizes = {_file_name(shard): shard["bytes"] for shard in manifest["shards"]}
        sizes[STATISTICS] = manifest["stats"]["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (AcsError, OSError, KeyError, TypeError):
        return False


def _file_name(entry: Mapping[str, Any]) -> str:
    return str(entry["key"]).rpartition("/")[2]


def _place(layers: tuple[int, ...], layer: int) -> int:
    try:
        return layers.index(layer)
    except ValueError:
        raise invalid_argument(f"Layer {layer} was not harvested, but {list(layers)}.", param="layer") from None
