"""One run of a Harvest job: from its corpus to its manifest."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog
import torch

from acsinfra.core.storage import Storage, StorageUnavailableError, StoredObject
from harvest import services
from harvest.models import HarvestJob, HarvestShard
from harvest.runner.corpus import TokenisedPrompt, load_prompts, load_tokenizer, tokenise
from harvest.runner.lease_keeper import LeaseKeeper
from harvest.runner.manifest import write_manifest
from harvest.runner.projection import Projection
from harvest.runner.retries import write_patiently
from harvest.runner.shards import SAFETENSORS_DTYPES, ShardLayout, lay_out_shards
from harvest.runner.statistics import RunningStatistics
from harvest.runner.stopwatch import Stopwatch
from harvest.runner.uploads import ShardUploads
from inference.engine.activations import all_finite
from inference.engine.errors import RequestFault
from inference.engine.harvest import CapturedPrompt, HarvestEngine
from inference.models import BaseModel
from inference.wire import TensorDtype

logger = structlog.get_logger(__name__)

SMALL_FILE_PAUSES: Final = (0.5, 2.0, 5.0)


class RunStopped(Exception):
    """The run was told to stop before its end."""


class HarvestRun:
    """A claimed job on its way. `run` returns when it is done, and raises what kept it from that.

    Shards that an earlier claim left whole are kept with their sums. `get_engine` loads the engine or has it loaded.
    """

    def __init__(
        self,
        *,
        job: HarvestJob,
        owner: uuid.UUID,
        model: BaseModel,
        storage: Storage,
        get_engine: Callable[[], HarvestEngine],
        keeper: LeaseKeeper,
        watch: Stopwatch,
    ) -> None:
        self._job, self._owner, self._model, self._storage = job, owner, model, storage
        self._get_engine = get_engine
        self._keeper, self._progress = keeper, keeper.progress
        self._watch = watch
        self._stored: dict[int, StoredObject] = {}
        self._sums: dict[int, RunningStatistics] = {}

    def run(self) -> HarvestJob:
        """Read, write and end the job as done.

        Raises RunStopped, LeaseLostError, StorageError, RequestFault, EngineRefused, EngineDied, DatabaseError.
        """
        corpus = self._job.corpus
        projection = (
            Projection.from_bytes(bytes(corpus.directions), self._model.hidden_size) if corpus.directions else None
        )
        prompts = tokenise(
            load_prompts(corpus),
            tokenizer=load_tokenizer(bytes(self._model.files.tokenizer_zstd)),
            add_special_tokens=self._job.add_special_tokens,
            tokens_at_most=self._model.effective_max_model_len - 1,
        )
        self._check_stop()
        with self._watch.measure("load_s"):
            engine = self._get_engine()
        self._check_stop()
        dtype: TensorDtype = engine.facts.dtype if projection is None else "float32"
        layouts = lay_out_shards(
            prompts,
            shard_size=self._job.shard_size,
            n_layers=len(self._job.layers),
            n_columns=engine.facts.hidden_size if projection is None else projection.n_directions,
            dtype=SAFETENSORS_DTYPES[dtype],
        )
        with self._watch.measure("upload_s"):
            self._keep_whole_shards(layouts)
        uploads = ShardUploads(self._storage)
        try:
            self._write_shards(engine, [one for one in layouts if one.index not in self._stored], projection, uploads)
            uploads.wait_until_written()
        finally:
            uploads.close()
            self._watch.upload_s += uploads.waited_s
        return self._finish(layouts, prompts, dtype, projection)

    def _keep_whole_shards(self, layouts: Sequence[ShardLayout]) -> None:
        """Take over what an earlier claim wrote, as far as it is in storage still with its sums."""
        by_index = {layout.index: layout for layout in layouts}
        for shard in HarvestShard.objects.filter(job=self._job):
            layout = by_index.get(shard.index)
            if layout is None or self._storage.size(shard.key) != shard.bytes or shard.bytes != layout.file_bytes():
                continue
            if self._storage.size(shard.sums_key) is None:
                continue
            self._sums[shard.index] = RunningStatistics.from_bytes(self._storage.read(shard.sums_key))
            self._stored[shard.index] = StoredObject(shard.key, shard.bytes, shard.sha256)
            self._count(layout, shard.bytes)
        if self._job.claims > 1:
            self._storage.discard_unfinished(self._job.storage_prefix)

    def _write_shards(
        self,
        engine: HarvestEngine,
        layouts: Sequence[ShardLayout],
        projection: Projection | None,
        uploads: ShardUploads,
    ) -> None:
        prompts = ((prompt.index, prompt.token_ids.tolist()) for layout in layouts for prompt in layout.prompts)
        to_read = ((index, token_ids) for index, token_ids in prompts if token_ids)
        captured = engine.capture(to_read, self._job.layers, should_stop=self._keeper.should_stop)
        with closing(captured):  # type: ignore[type-var]
            in_order = _InOrder(captured, watch=self._watch, check_stop=self._check_stop)
            for layout in layouts:
                self._write_shard(layout, in_order, engine.facts.dtype, projection, uploads)

    def _write_shard(
        self,
        layout: ShardLayout,
        in_order: "_InOrder",
        model_dtype: TensorDtype,
        projection: Projection | None,
        uploads: ShardUploads,
    ) -> None:
        prefix = self._job.claim_prefix
        sums = RunningStatistics(layout.n_layers, layout.n_columns)
        uploads.begin(f"{prefix}/{layout.name}", expected_bytes=layout.file_bytes())
        for part in layout.beginning():
            uploads.write(part)
        for prompt in layout.prompts:
            if not len(prompt.token_ids):
                self._progress.prompts += 1
                continue
            array = in_order.take(prompt.index)
            self._check_stop()
            waited_before = uploads.waited_s
            with self._watch.measure("save_s"):
                values = _values(array, model_dtype, prompt, (layout.n_layers, self._model.hidden_size))
                if projection is not None:
                    values = projection.project(values)
                    array = values.numpy()
                sums.add(values[:, 1:] if self._begins_with_bos(prompt) else values)
                uploads.write(memoryview(np.ascontiguousarray(array)).cast("B"))
            # The wait for the storage inside `write` is the uploads' own.
            self._watch.save_s -= uploads.waited_s - waited_before
            self._progress.prompts += 1
            self._progress.tokens += len(prompt.token_ids)
        self._sums[layout.index] = sums
        uploads.end(lambda stored: self._shard_is_whole(layout.index, stored, sums))

    def _shard_is_whole(self, index: int, stored: StoredObject, sums: RunningStatistics) -> None:
        """Runs in the uploads' thread: the sums first, so that a row always has them."""
        sums_key = f"{self._job.claim_prefix}/sums/sums_{index:05}.safetensors"
        self._storage.write(sums_key, sums.to_bytes())
        write_patiently(
            lambda: services.record_shard(
                job_id=self._job.pk, owner=self._owner, index=index, stored=stored, sums_key=sums_key
            )
        )
        self._stored[index] = stored
        self._progress.bytes_written += stored.bytes

    def _finish(
        self,
        layouts: Sequence[ShardLayout],
        prompts: Sequence[TokenisedPrompt],
        dtype: str,
        projection: Projection | None,
    ) -> HarvestJob:
        with self._watch.measure("save_s"):
            total = RunningStatistics(layouts[0].n_layers, layouts[0].n_columns)
            for layout in layouts:
                total.merge(self._sums[layout.index])
            stats_file = total.to_stats_file()
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        prefix = self._job.claim_prefix
        with self._watch.measure("upload_s"):
            stats = self._write_small_file(f"{prefix}/stats.safetensors", stats_file)
            manifest_json = write_manifest(
                job=self._job,
                checkpoint=self._model.served_model_name,
                dtype=dtype,
                layouts=layouts,
                shards=self._stored,
                stats=stats,
                tokens=tokens,
                n_directions=None if projection is None else projection.n_directions,
            )
            manifest = self._write_small_file(f"{prefix}/manifest.json", manifest_json)
        written = sum(stored.bytes for stored in self._stored.values()) + stats.bytes + manifest.bytes
        result = {
            "manifest_key": manifest.key,
            "stats_key": stats.key,
            "bytes_written": written,
            "timings": self._watch.timings(),
        }
        return write_patiently(
            lambda: services.finish_harvest(job_id=self._job.pk, owner=self._owner, tokens=tokens, result=result)
        )

    def _write_small_file(self, key: str, content: bytes) -> StoredObject:
        """Write a file whose content is at hand, trying again: the whole run is done by now."""
        for pause in SMALL_FILE_PAUSES:
            try:
                return self._storage.write(key, content)
            except StorageUnavailableError as error:
                logger.warning("a file could not be written; trying again", reason=str(error))
                time.sleep(pause)
                self._check_stop()
        return self._storage.write(key, content)

    def _begins_with_bos(self, prompt: TokenisedPrompt) -> bool:
        return self._model.bos_token_id is not None and int(prompt.token_ids[0]) == self._model.bos_token_id

    def _count(self, layout: ShardLayout, written: int) -> None:
        self._progress.prompts += len(layout.prompts)
        self._progress.tokens += sum(len(prompt.token_ids) for prompt in layout.prompts)
        self._progress.bytes_written += written

    def _check_stop(self) -> None:
        if self._keeper.should_stop():
            raise RunStopped


class _InOrder:
    """Hands out what the engine reads in the order of the prompts; the engine finishes short ones first.

    What waits here is bounded by the engine's window.
    """

    def __init__(self, captured: Iterator[CapturedPrompt], *, watch: Stopwatch, check_stop: Callable[[], None]) -> None:
        self._captured, self._watch, self._check_stop = captured, watch, check_stop
        self._early: dict[int, npt.NDArray[np.generic]] = {}

    def take(self, index: int) -> npt.NDArray[np.generic]:
        """The values of prompt `index`, which comes next. Raises RunStopped when the engine was told to stop."""
        with self._watch.measure("forward_s"):
            while index not in self._early:
                one = next(self._captured, None)
                if one is None:
                    self._check_stop()
                    raise RequestFault(f"prompt {index}: the engine ended without reading it")
                self._early[one.index] = one.array
        return self._early.pop(index)


def _values(
    array: npt.NDArray[np.generic], dtype: TensorDtype, prompt: TokenisedPrompt, sizes: tuple[int, int]
) -> torch.Tensor:
    """The captured values as a tensor [layers, tokens, hidden] of their own dtype, checked. Raises RequestFault."""
    n_layers, hidden = sizes
    if array.shape != (n_layers, len(prompt.token_ids), hidden):
        raise RequestFault(f"prompt {prompt.index}: the engine gave values of a wrong shape")
    if not all_finite(array, dtype):
        raise RequestFault(f"prompt {prompt.index}: the model's values are not finite")
    values = torch.from_numpy(array)
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values
