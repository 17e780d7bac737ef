"""One run of a Harvest job: from its corpus to its manifest."""

import itertools
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
from harvest.runner.corpus import TokenisedPrompt, tokenise_corpus
from harvest.runner.lease_keeper import LeaseKeeper
from harvest.runner.lives import PromptsInFlight
from harvest.runner.manifest import write_manifest
from harvest.runner.retries import write_patiently
from harvest.runner.shards import SAFETENSORS_DTYPES, ShardLayout, lay_out_shards
from harvest.runner.statistics import RunningStatistics
from harvest.runner.stopwatch import Stopwatch
from harvest.runner.uploads import ShardUploads
from harvest.runner.windows import (
    WAIT_SECONDS,
    OpenWindow,
    ShardPart,
    WindowMemory,
    WindowReader,
    plan_windows,
)
from inference.engine.activations import ARRAY_DTYPES, all_finite
from inference.engine.errors import RequestFault
from inference.engine.harvest import CapturedPrompt, HarvestEngine
from inference.models import BaseModel
from inference.wire import TensorDtype

logger = structlog.get_logger(__name__)

SMALL_FILE_PAUSES: Final = (0.5, 2.0, 5.0)
# So much of a shard is hashed and written at a time.
WRITE_BYTES: Final = 1024 * 1024


class RunStopped(Exception):
    """The run was told to stop before its end."""


class HarvestRun:
    """A claimed job on its way. `run` returns when it is done, and raises what kept it from that.

    Shards that an earlier claim left whole are kept with their sums. `get_engine` takes the
    tokens to read and loads the engine that suits, or has it loaded. `memory` holds what is read and not yet written;
    `in_flight` tells which prompts the engine holds.
    """

    def __init__(
        self,
        *,
        job: HarvestJob,
        owner: uuid.UUID,
        model: BaseModel,
        storage: Storage,
        get_engine: Callable[[int], HarvestEngine],
        keeper: LeaseKeeper,
        watch: Stopwatch,
        memory: WindowMemory,
        in_flight: PromptsInFlight,
    ) -> None:
        self._job, self._owner, self._model, self._storage = job, owner, model, storage
        self._get_engine = get_engine
        self._keeper, self._progress = keeper, keeper.progress
        self._watch = watch
        self._memory = memory
        self._in_flight = in_flight
        self._stored: dict[int, StoredObject] = {}
        self._sums: dict[int, RunningStatistics] = {}

    def run(self) -> HarvestJob:
        """Read, write and end the job as done.

        Raises RunStopped, LeaseLostError, StorageError, RequestFault, EngineRefused, EngineDied, DatabaseError.
        """
        directions = _directions(self._job.corpus.directions, self._model.hidden_size)
        prompts = tokenise_corpus(self._job, self._model)
        self._check_stop()
        with self._watch.measure("load_s"):
            engine = self._get_engine(sum(len(prompt.token_ids) for prompt in prompts))
        self._check_stop()
        dtype: TensorDtype = engine.facts.dtype if directions is None else "float32"
        layouts = lay_out_shards(
            prompts,
            shard_size=self._job.shard_size,
            n_layers=len(self._job.layers),
            n_columns=engine.facts.hidden_size if directions is None else len(directions),
            dtype=SAFETENSORS_DTYPES[dtype],
        )
        with self._watch.measure("upload_s"):
            self._keep_whole_shards(layouts)
        uploads = ShardUploads(self._storage)
        try:
            self._write_shards(engine, layouts, dtype, directions, uploads)
            uploads.wait_until_written()
        finally:
            uploads.close()
            # What a run that stops early has not given back, the next one needs.
            self._memory.take_back_all()
            self._watch.upload_s += uploads.waited_s
        return self._finish(layouts, prompts, dtype, None if directions is None else len(directions))

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
        dtype: TensorDtype,
        directions: npt.NDArray[np.float32] | None,
        uploads: ShardUploads,
    ) -> None:
        """Have the engine read what is not stored yet, window by window, and hand whole windows to the uploads."""

        def wait_for_memory() -> None:
            self._check_stop()
            uploads.check()
            with self._watch.measure("upload_s", instead_of="forward_s"):
                self._memory.wait(WAIT_SECONDS)

        windows = plan_windows(layouts, leave_out=self._stored.keys(), bytes_at_most=self._memory.window_bytes)
        reader = WindowReader(windows, dtype=ARRAY_DTYPES[dtype], memory=self._memory, wait=wait_for_memory)
        captured = engine.capture(
            self._noted(reader.prompts()),
            self._job.layers,
            directions=directions,
            place=reader.place,
            should_stop=self._keeper.should_stop,
        )
        with closing(captured):  # type: ignore[type-var]
            while (one := self._next(captured)) is not None:
                self._check_stop()
                reader.arrived(one.index)
                self._in_flight.remove(one.index)
                self._progress.tokens += len(one.token_ids)
                for opened in reader.whole_windows():
                    self._write_window(reader, opened, dtype, uploads)
        self._check_stop()
        for opened in reader.whole_windows():
            self._write_window(reader, opened, dtype, uploads)
        if (index := reader.first_missing()) is not None:
            raise RequestFault(f"prompt {index}: the engine ended without reading it")

    def _noted(self, prompts: Iterator[tuple[int, list[int]] | None]) -> Iterator[tuple[int, list[int]] | None]:
        for one in prompts:
            if one is not None:
                self._in_flight.add(one[0])
            yield one

    def _next(self, captured: Iterator[CapturedPrompt]) -> CapturedPrompt | None:
        with self._watch.measure("forward_s"):
            return next(captured, None)

    def _write_window(
        self, reader: WindowReader, opened: OpenWindow, dtype: TensorDtype, uploads: ShardUploads
    ) -> None:
        arrays = reader.arrays(opened)
        start = 0
        for part in opened.window.parts:
            waited_before = uploads.waited_s
            with self._watch.measure("save_s"):
                sums = self._add_up(part, arrays, dtype)
                self._begin_shard(part, uploads)
                for at in range(start, start + part.nbytes, WRITE_BYTES):
                    uploads.write(memoryview(opened.block[at : min(at + WRITE_BYTES, start + part.nbytes)]))
                start += part.nbytes
                self._end_shard(part, sums, uploads)
            # The wait for the storage inside `write` is the uploads' own.
            self._watch.save_s -= uploads.waited_s - waited_before
        uploads.then(lambda: self._memory.give_back(opened.block))

    def _add_up(
        self, part: ShardPart, arrays: Iterator[tuple[TokenisedPrompt, npt.NDArray[np.generic]]], dtype: TensorDtype
    ) -> RunningStatistics:
        """The shard's sums with this part's prompts. Raises RequestFault for a value that is not finite."""
        layout = part.layout
        if part.is_first:
            self._sums[layout.index] = RunningStatistics(layout.n_layers, layout.n_columns)
        sums = self._sums[layout.index]
        for prompt, array in itertools.islice(arrays, len(part.prompts)):
            if len(prompt.token_ids):
                first = 1 if self._begins_with_bos(prompt) else 0
                values = torch.from_numpy(array)
                sums.add((values.view(torch.bfloat16) if dtype == "bfloat16" else values)[:, first:])
                # A value that is not finite makes the sums so: only then each is looked at.
                if not (sums.is_finite and all_finite(array[:, :first], dtype)) and not all_finite(array, dtype):
                    raise RequestFault(f"prompt {prompt.index}: the model's values are not finite")
            self._progress.prompts += 1
        return sums

    def _begin_shard(self, part: ShardPart, uploads: ShardUploads) -> None:
        if part.is_first:
            layout = part.layout
            uploads.begin(f"{self._job.claim_prefix}/{layout.name}", expected_bytes=layout.file_bytes())
            uploads.write(b"".join(layout.beginning()))

    def _end_shard(self, part: ShardPart, sums: RunningStatistics, uploads: ShardUploads) -> None:
        if part.is_last:
            index = part.layout.index
            uploads.end(lambda stored: self._shard_is_whole(index, stored, sums))

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
        n_directions: int | None,
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
                n_directions=n_directions,
            )
            manifest = self._write_small_file(f"{prefix}/manifest.json", manifest_json)
        written = sum(stored.bytes for stored in self._stored.values()) + stats.bytes + manifest.bytes
        result = {
            "manifest_key": manifest.key,
            "manifest_bytes": manifest.bytes,
            "stats_key": stats.key,
            "stats_bytes": stats.bytes,
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


def _directions(content: bytes | memoryview | None, hidden_size: int) -> npt.NDArray[np.float32] | None:
    """The job's directions, float32 [directions, hidden], of any length but zero; None when it has none."""
    return np.frombuffer(bytes(content), "<f4").reshape(-1, hidden_size) if content else None
