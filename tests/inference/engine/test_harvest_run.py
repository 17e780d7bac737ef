"""A runner's run around its engine: bounded memory, a slow storage, files in order whatever is read first."""

import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from django.conf import settings
from safetensors import safe_open

from acsinfra.core.leases import claim_next
from acsinfra.core.storage import FolderStorage, ObjectWriter
from harvest.models import PROMPTS_AT_MOST, HarvestJob
from harvest.runner.lease_keeper import LeaseKeeper
from harvest.runner.lives import PromptsInFlight
from harvest.runner.stopwatch import Stopwatch
from harvest.runner.windows import WindowMemory
from harvest.services import submit_harvest
from inference.models import BaseModel
from inference.services import add_model
from tests.harvest.conftest import make_user, plan_for
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import assert_same_stream

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine

# A token's values at four layers: 1 KiB.
TOKEN_BYTES = 4 * 64 * 4
MEMORY_BYTES = 1024 * TOKEN_BYTES
WORDS = "the rain fell on the harbour all morning and by noon the boats had gone out anyway "


class SlowStorage(FolderStorage):
    """A folder that takes no shard before it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_ready = threading.Event()

    def open_writer(self, key: str, *, expected_bytes: int = 0) -> ObjectWriter:
        assert self.is_ready.wait(60)
        return super().open_writer(key, expected_bytes=expected_bytes)


@pytest.fixture
def model(transactional_db: None, tiny_float32: Path) -> BaseModel:
    add_model(name="tiny", source=str(tiny_float32), dtype="float32")
    return BaseModel.objects.select_related("files").get(name="tiny")


@pytest.mark.parametrize("shard_size", [5, 200])
def test_a_slow_storage_stops_the_engine_within_its_window(
    harvest: "HarvestEngine", reference: ReferenceModel, model: BaseModel, tmp_path: Path, shard_size: int
) -> None:
    from harvest.runner.run import HarvestRun

    # Ragged, the longest somewhere in between: 10 times what the memory holds.
    prompts = [f"{index} {WORDS * (1 + index * 7 % 11)}" for index in range(100)]
    submit_harvest(
        user=make_user("ada"),
        api_key=None,
        plan=plan_for(model, prompts=prompts, layers=(0, 1, 2, 3), shard_size=shard_size, reserved_tokens=50_000),
    )
    owner = uuid.uuid4()
    job_id = claim_next(HarvestJob, base_model_id=model.pk, owner=owner, lease=settings.LEASE)
    assert job_id is not None
    job = HarvestJob.objects.get(pk=job_id)
    keeper = LeaseKeeper(job_id=job.pk, owner=owner, is_stopping=lambda: False)
    watch, storage, memory = Stopwatch(), SlowStorage(tmp_path), WindowMemory(MEMORY_BYTES)
    read_before_ready: list[int] = []

    def let_go_once_the_run_waits() -> None:
        while watch.upload_s < 0.5:
            time.sleep(0.01)
        read_before_ready.append(keeper.progress.tokens)
        storage.is_ready.set()

    threading.Thread(target=let_go_once_the_run_waits, daemon=True).start()
    run = HarvestRun(
        job=job,
        owner=owner,
        model=model,
        storage=storage,
        get_engine=lambda _tokens: harvest,
        keeper=keeper,
        watch=watch,
        memory=memory,
        in_flight=PromptsInFlight(PROMPTS_AT_MOST),
    )
    try:
        done = run.run()
    finally:
        keeper.end()

    tokens = done.tokens or 0
    assert tokens * TOKEN_BYTES > 10 * MEMORY_BYTES
    assert 0 < read_before_ready[0] * TOKEN_BYTES <= MEMORY_BYTES, "the engine read on while the storage took nothing"
    assert memory.peak_bytes <= MEMORY_BYTES
    timings = (done.result or {})["timings"]
    assert timings["upload_s"] >= 0.4
    assert timings["forward_s"] < sum(timings.values()) - timings["upload_s"]

    names = list(done.shards.order_by("index").values_list("key", flat=True))
    assert len(names) == -(-100 // shard_size)
    order: list[int] = []
    for name in names:
        with safe_open(tmp_path / name, "np") as shard:
            order += sorted(int(key.removeprefix("prompt_")) for key in shard.keys() if key.startswith("prompt_"))  # noqa: SIM118
            for index in (0, 17, 63, 99):
                if f"prompt_{index}" in shard.keys():  # noqa: SIM118
                    ids = shard.get_tensor(f"tokens_{index}").tolist()
                    assert_same_stream(np.asarray(shard.get_tensor(f"prompt_{index}")), reference.read(ids))
    assert order == list(range(100))
