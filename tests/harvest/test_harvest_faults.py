"""Harvests under which everything fails once: each goes on from its last whole shard, and ends as if nothing had been.

A runner with its own PostgreSQL, broker and S3 server, its tests in order; the last one stops the runner.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load
from tokenizers import Tokenizer

from acsinfra.core.storage import storage_from_url
from acsinfra.quickstart.embedded import EmbeddedPostgres, EmbeddedValkey
from acsinfra.quickstart.supervisor import Supervisor
from tests.failing_proxy import FailingProxy, failing_proxy
from tests.harvest.engine_faults import make_plugin
from tests.harvest.harvests import Harvest, assert_statistics
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, s3_server
from tests.stack import Stack

__all__ = ["s3_server"]

TEXT = "The children asked why the sky is blue, and why the grass is not; nobody in the room knew. "
# Some 50,000 tokens in 30 shards: the tiny model reads for seconds.
PROMPTS = [f"{index}: {TEXT * 20}" for index in range(120)]
FATAL, DEADLY, SLOW = "~", "|", "^"
SUBMIT = """
from accounts.models import User
from harvest import services
from inference.models import BaseModel
plan = services.HarvestPlan(
    base_model_id=BaseModel.objects.get(name="tiny").pk, model="tiny", prompts=prompts, layers=(0, 1, 2, 3),
    shard_size=4, batch_size=None, add_special_tokens=True, directions=None, bytes_at_most=10**9,
    reserved_tokens=sum(len(prompt.encode()) + 1 for prompt in prompts),
)
result = str(services.submit_harvest(user=User.objects.get(pk=user_id), api_key=None, plan=plan).pk)
"""
# There is no scheduler here: what it would do with a lease that ran out, and with a pause, is done at each look.
LOOK = """
from django.utils import timezone
from budgets.models import Hold
from harvest import services
from harvest.models import HarvestJob
services.end_expired_leases()
job = HarvestJob.objects.get(pk=job_id)
if hurry:
    HarvestJob.objects.filter(pk=job_id, retry_at__isnull=False).update(retry_at=timezone.now())
result = {
    "job_id": job_id, "status": job.status, "claims": job.claims, "tries": job.tries, "setbacks": job.setbacks,
    "tokens": job.tokens, "error": job.error, "result": job.result, "n_prompts": job.n_prompts,
    "shards": list(job.shards.values_list("key", flat=True)),
    "holds": list(Hold.objects.filter(work_kind="harvest", work_id=job_id).values_list("state", "charged")),
    "seconds": (job.completed_at - job.started_at).total_seconds() if job.completed_at and job.started_at else None,
}
"""


@dataclass
class Fragile:
    """The parts, each of which a test may kill."""

    stack: Stack
    supervisor: Supervisor
    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey
    s3: FailingProxy
    slow_file: Path

    def submit(self, prompts: list[str]) -> str:
        """Put a job in line; return its id."""
        return str(self.stack.django(SUBMIT, prompts=prompts, user_id=self.stack.user.id))

    def look(self, job_id: str, *, hurry: bool = True) -> dict[str, Any]:
        """Return the job's row; with `hurry` it need not wait out its pause."""
        return dict(self.stack.django(LOOK, job_id=job_id, hurry=hurry))

    def wait(
        self, job_id: str, is_true: Callable[[dict[str, Any]], bool], *, hurry: bool = True, seconds: float = 240
    ) -> dict[str, Any]:
        """Wait until the job's row is so."""
        deadline = time.monotonic() + seconds
        while not is_true(row := self.look(job_id, hurry=hurry)):
            assert time.monotonic() < deadline, row
            self.stack.children["runner"].check()
            time.sleep(0.05)
        return row

    def run(self, prompts: list[str]) -> dict[str, Any]:
        """Submit a job and wait for its end."""
        return self.wait(self.submit(prompts), has_ended)

    def begin(self) -> str:
        """Submit the long job; return its id once some of its shards are whole."""
        job_id = self.submit(PROMPTS)
        self.wait(job_id, lambda row: len(row["shards"]) >= 3)
        return job_id

    def download(self, row: dict[str, Any]) -> Harvest:
        """Read the files of a done job."""
        assert row["status"] == "done", row
        storage = storage_from_url(f"s3://bucket/kept?endpoint={self.s3.endpoint}&region=us-east-1")
        manifest = json.loads(storage.read(row["result"]["manifest_key"]))
        tensors: dict[str, Any] = {}
        for shard in manifest["shards"]:
            tensors |= load(storage.read(shard["key"]))
        indexes = range(row["n_prompts"])
        return Harvest(
            job=row,
            manifest=manifest,
            stats=load(storage.read(row["result"]["stats_key"])),
            values={index: tensors[f"prompt_{index}"] for index in indexes},
            ids={index: tensors[f"tokens_{index}"].tolist() for index in indexes},
        )

    @property
    def engine(self) -> psutil.Process:
        """The process that the runner's engine is in."""
        return self.stack.engine_process("runner")


def has_ended(row: dict[str, Any]) -> bool:
    return row["status"] in ("done", "failed", "cancelled")


@pytest.fixture(scope="module")
def fragile(tiny_model: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    root = tmp_path_factory.mktemp("faults")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    supervisor = Supervisor(root / "home")
    try:
        postgres, valkey = EmbeddedPostgres(supervisor, durable=False), EmbeddedValkey(supervisor)
        postgres.start()
        valkey.start()
        with failing_proxy(s3_server.endpoint) as proxy:
            stack = Stack(supervisor, postgres=postgres, broker_url=valkey.url, tiny_model=tiny_model, name="faults")
            stack.env |= {
                "STORAGE_URL": f"s3://bucket/kept?endpoint={proxy.endpoint}&region=us-east-1",
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "PYTHONPATH": str(make_plugin(root / "plugin")),
                "FATAL_TOKEN": str(tokenizer.token_to_id(FATAL)),
                "DEADLY_TOKEN": str(tokenizer.token_to_id(DEADLY)),
                "SLOW_TOKEN": str(tokenizer.token_to_id(SLOW)),
                "SLOW_FILE": str(root / "slow"),
                "LEASE_SECONDS": "20",
                "LEASE_RENEWAL_SECONDS": "2",
                "RUNNER_IDLE_SECONDS": "5",
            }
            stack.end_console()
            stack.start("runner")
            yield Fragile(stack, supervisor, postgres, valkey, proxy, root / "slow")
            stack.close()
    finally:
        supervisor.close()


@pytest.fixture(scope="module")
def undisturbed(fragile: Fragile) -> Harvest:
    harvest = fragile.download(fragile.run(PROMPTS))
    assert (harvest.job["claims"], harvest.job["tries"], harvest.job["setbacks"]) == (1, 0, 0)
    assert_statistics(harvest, bos=0)
    # The timings are all of its time.
    timings = harvest.job["result"]["timings"]
    assert min(timings.values()) >= 0
    assert abs(sum(timings.values()) - harvest.job["seconds"]) < max(0.5, harvest.job["seconds"] / 10)
    return harvest


def assert_as_undisturbed(fragile: Fragile, row: dict[str, Any], undisturbed: Harvest) -> None:
    harvest = fragile.download(row)
    assert row["holds"] == [["settled", undisturbed.job["tokens"]]]
    assert row["tokens"] == undisturbed.job["tokens"]
    assert harvest.ids == undisturbed.ids
    for index, values in undisturbed.values.items():
        assert np.abs(harvest.values[index] - values).max() <= 1e-5 * np.abs(values).max()
    for name, values in undisturbed.stats.items():
        assert np.allclose(harvest.stats[name], values, rtol=1e-5, atol=1e-6)


def test_a_broker_that_is_killed_changes_nothing(fragile: Fragile, undisturbed: Harvest) -> None:
    job_id = fragile.begin()
    fragile.supervisor.kill("valkey")
    row = fragile.wait(job_id, has_ended)
    assert_as_undisturbed(fragile, row, undisturbed)
    assert row["claims"] == 1
    fragile.valkey.start(port=fragile.valkey.port)
    assert fragile.run(["Hello"])["status"] == "done"


def test_a_database_that_is_killed_changes_nothing(fragile: Fragile, undisturbed: Harvest) -> None:
    job_id = fragile.begin()
    fragile.stack.end_console()
    fragile.supervisor.kill("postgres")
    fragile.postgres.start(port=fragile.postgres.port)
    assert_as_undisturbed(fragile, fragile.wait(job_id, has_ended), undisturbed)


def test_a_storage_that_answers_500_is_waited_for(fragile: Fragile, undisturbed: Harvest) -> None:
    job_id = fragile.begin()
    fragile.s3.is_failing = True
    away = fragile.wait(job_id, lambda row: row["status"] == "pending", hurry=False)
    # Each request was tried again before the job was put back.
    assert fragile.s3.failures >= 4
    assert (away["setbacks"], away["tries"], away["holds"]) == (1, 0, [["live", None]])
    fragile.s3.is_failing = False
    row = fragile.wait(job_id, has_ended)
    assert_as_undisturbed(fragile, row, undisturbed)
    assert row["claims"] == 2
    assert row["shards"][: len(away["shards"])] == away["shards"]
    assert all("claim_2" in key for key in row["shards"][len(away["shards"]) :])


@pytest.mark.parametrize("token", [DEADLY, pytest.param(FATAL, marks=pytest.mark.long)])
def test_a_prompt_that_ends_the_engine_is_named_and_the_runner_lives_on(fragile: Fragile, token: str) -> None:
    """By a fault that the engine tells of, and by a signal that takes its whole process along."""
    died = fragile.engine
    row = fragile.run(["Rain", f"fell on the {token}"])
    assert (row["status"], row["error"]) == ("failed", "The model could not read prompt 1 of this job.")
    assert (row["claims"], row["tries"], row["tokens"], row["holds"]) == (1, 1, 0, [["released", None]])
    assert not died.is_running()
    assert fragile.run(["Hello"])["status"] == "done"
    fragile.stack.children["runner"].check()


def test_an_engine_that_is_idle_is_freed_and_loaded_again(fragile: Fragile) -> None:
    fragile.run(["Hello"])
    freed = "the engine has been idle; it is freed"
    loaded_bytes, seen = fragile.engine.memory_info().vms, fragile.stack.log("runner").count(freed)
    fragile.stack.wait_for(lambda: fragile.stack.log("runner").count(freed) > seen, part="runner", seconds=60)
    # The cache of keys and values alone has 1 GiB.
    fragile.stack.wait_for(
        lambda: loaded_bytes - fragile.engine.memory_info().vms > 0.9 * 1024**3, part="runner", seconds=60
    )
    assert fragile.run(["Hello"])["status"] == "done"


def test_a_runner_that_is_stopped_in_a_long_step_hands_its_job_back(fragile: Fragile) -> None:
    job_id = fragile.submit([SLOW])
    fragile.stack.wait_for(fragile.slow_file.exists, part="runner", seconds=120)
    child = fragile.stack.children["runner"]
    child.record.signal_group(child.record.stop_signal)
    # Within the ten seconds that a stopped runner has; and not because the lease ran out, which is a try.
    row = fragile.wait(job_id, lambda row: row["status"] == "pending", seconds=10)
    assert (row["tries"], row["holds"]) == (0, [["live", None]])
    # Its step still goes on.
    fragile.stack.kill("runner")
