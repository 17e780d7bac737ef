"""Runners that are killed, stopped, cancelled, or two: every job still comes to its one right end."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from redis import Redis

from acsinfra.quickstart.supervisor import Child
from tests.harvest.harvests import assert_statistics, download, read_job, submit, wait_for
from tests.s3_server import S3Server, s3_server
from tests.stack import Part, Stack

__all__ = ["s3_server"]

TEXT = "The children asked why the sky is blue, and why the grass is not; nobody in the room knew. "
# Some 50,000 tokens in 30 shards: the tiny model reads for seconds.
LONG: dict[str, Any] = {"prompts": [f"{index}: {TEXT * 20}" for index in range(120)], "layers": "all", "shard_size": 4}
PARTS: tuple[Part, ...] = ("api", "runner", "scheduler")
ROW = """
from budgets.models import GpuTime, Hold
from budgets.selectors import imbalances
from harvest.models import HarvestJob
job = HarvestJob.objects.get(pk=job_id)
result = {
    "status": job.status, "claims": job.claims, "tries": job.tries, "tokens": job.tokens,
    "setbacks": job.setbacks,
    "shards": list(job.shards.values_list("key", flat=True)),
    "holds": list(Hold.objects.filter(work_kind="harvest", work_id=str(job.pk)).values_list("state", "charged")),
    "gpu_seconds": [time.gpu_seconds for time in GpuTime.objects.filter(model="tiny", kind="runner")],
    "imbalances": [imbalance.row for imbalance in imbalances()],
}
"""
LET_THE_LEASE_RUN_OUT = """
from datetime import timedelta
from django.utils import timezone
from harvest.models import HarvestJob
past = timezone.now() - timedelta(seconds=1)
result = HarvestJob.objects.filter(pk=job_id, status="running").update(lease_expires_at=past)
"""


def row(stack: Stack, job: dict[str, Any]) -> dict[str, Any]:
    return dict(stack.django(ROW, job_id=job["job_id"]))


def wait_until(is_true: Callable[[], bool], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def another_runner(stack: Stack, model: str) -> Iterator[Child]:
    """Run a runner of `model` beside the stack's, from when it takes jobs until the block ends."""
    supervisor, name = stack._supervisor, f"another-runner-of-{model}"
    child = stack.spawn("runner", name=name, model=model)
    try:
        wait_until(lambda: "takes jobs" in child.log_text())
        yield child
        child.check()
    finally:
        supervisor.stop(name)


@pytest.fixture(scope="module")
def undisturbed(harvest_stack: Stack) -> Any:
    return download(wait_for(harvest_stack, submit(harvest_stack, **LONG)["job_id"]))


def test_a_job_whose_runner_is_killed_is_finished_by_another(harvest_stack: Stack, undisturbed: Any) -> None:
    job = submit(harvest_stack, **LONG)
    wait_until(lambda: len(row(harvest_stack, job)["shards"]) >= 3)
    harvest_stack.kill("runner")
    left = row(harvest_stack, job)
    assert left["status"] == "running"
    assert left["holds"] == [["live", None]]
    # What the killed runner was up is recorded, to a heartbeat.
    assert max(left["gpu_seconds"]) > 0
    assert 3 <= len(left["shards"]) < 30
    started_at = read_job(harvest_stack, job["job_id"])["started_at"]
    # Before the other starts, which may take longer than the lease.
    assert harvest_stack.django(LET_THE_LEASE_RUN_OUT, job_id=job["job_id"]) == 1
    harvest_stack.start("runner")
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    after = row(harvest_stack, job)
    assert (after["claims"], after["tries"]) == (2, 1)
    assert harvest.job["started_at"] == started_at
    assert (after["holds"], after["imbalances"]) == ([["settled", harvest.job["tokens"]]], [])
    # What was whole was kept, the rest was written to a place of its own.
    assert after["shards"][: len(left["shards"])] == left["shards"]
    assert all("claim_2" in key for key in after["shards"][len(left["shards"]) :])
    assert harvest.job["tokens"] == undisturbed.job["tokens"]
    assert harvest.ids == undisturbed.ids
    for index, values in undisturbed.values.items():
        assert np.abs(harvest.values[index] - values).max() <= 1e-5 * np.abs(values).max()
    for name, values in undisturbed.stats.items():
        assert np.allclose(harvest.stats[name], values, rtol=1e-5, atol=1e-6)
    assert_statistics(harvest, bos=0)
    names = [path.name for path in harvest_stack.files.rglob("*") if job["run_id"] in str(path)]
    assert not [name for name in names if name.endswith(".partial")]


def test_a_runner_that_is_stopped_hands_its_job_back_at_once(harvest_stack: Stack) -> None:
    job = submit(harvest_stack, **LONG)
    wait_until(lambda: len(row(harvest_stack, job)["shards"]) >= 1)
    child = harvest_stack.children["runner"]
    child.record.signal_group(child.record.stop_signal)
    # Within the ten seconds that a stopped runner has; and not because its lease ran out: that would be a try, below.
    wait_until(lambda: row(harvest_stack, job)["status"] == "pending", seconds=10)
    harvest_stack.stop("runner")
    assert child.process.returncode == 0
    waiting = read_job(harvest_stack, job["job_id"])
    assert (waiting["status"], waiting["completed_at"]) == ("pending", None)
    assert waiting["started_at"] is not None
    harvest_stack.start("runner")
    done = wait_for(harvest_stack, job["job_id"])
    assert (done["status"], done["started_at"]) == ("done", waiting["started_at"])
    assert row(harvest_stack, job)["tries"] == 0


def test_a_full_disk_is_waited_for(harvest_stack: Stack, undisturbed: Any) -> None:
    """As a quota makes it: no file of the runner may grow past half of a shard."""
    pid = harvest_stack.engine_process("runner").pid
    job = submit(harvest_stack, **LONG)
    wait_until(lambda: len(row(harvest_stack, job)["shards"]) >= 2)
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_000_000, most))
    try:
        wait_until(lambda: row(harvest_stack, job)["setbacks"] >= 1)
        left = row(harvest_stack, job)
        assert (left["tries"], left["holds"]) == (0, [["live", None]])
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    after = row(harvest_stack, job)
    assert after["shards"][: len(left["shards"])] == left["shards"]
    assert after["holds"] == [["settled", harvest.job["tokens"]]]
    assert harvest.ids == undisturbed.ids
    for index, values in undisturbed.values.items():
        assert np.abs(harvest.values[index] - values).max() <= 1e-5 * np.abs(values).max()
    assert_statistics(harvest, bos=0)


def test_a_cancelled_job_stops_within_a_second_and_frees_the_runner(harvest_stack: Stack, undisturbed: Any) -> None:
    job = submit(harvest_stack, **LONG)
    wait_until(lambda: len(row(harvest_stack, job)["shards"]) >= 1)
    following = submit(harvest_stack, prompts=["Hello"])
    with harvest_stack.client() as client:
        cancelled = client.delete(f"harvest/{job['job_id']}").json()
    assert (cancelled["status"], cancelled["tokens"]) == ("cancelled", job["reserved_tokens"])
    done = wait_for(harvest_stack, following["job_id"])
    assert done["status"] == "done"
    assert done["started_at"] > cancelled["completed_at"]
    gap = _seconds(cancelled["completed_at"], done["started_at"])
    # A second to notice and to end the step that runs, and another on a machine that other work shares; on a slow one,
    # long before it would have ended by itself.
    assert gap < max(2.0, _seconds(undisturbed.job["started_at"], undisturbed.job["completed_at"]) / 2)
    assert read_job(harvest_stack, job["job_id"]) == cancelled


def test_what_waits_is_cancelled_for_nothing(harvest_stack: Stack) -> None:
    first = submit(harvest_stack, **LONG)
    second = submit(harvest_stack, prompts=["Hello"])
    with harvest_stack.client() as client:
        assert client.post(f"harvest/{second['job_id']}/cancel").json()["tokens"] == 0
        client.delete(f"harvest/{first['job_id']}")
    assert row(harvest_stack, second)["claims"] == 0


def test_progress_grows_while_a_job_runs(harvest_stack: Stack) -> None:
    job = submit(harvest_stack, **LONG)
    seen: list[dict[str, int]] = []

    def progress_has_grown() -> bool:
        answer = read_job(harvest_stack, job["job_id"])
        assert answer["status"] in ("pending", "running"), answer
        if answer["status"] == "running":
            assert set(answer["progress"]) == {"prompts", "tokens", "bytes_written"}
            seen.append(answer["progress"])
        return bool(seen) and seen[-1]["bytes_written"] > 0

    wait_until(progress_has_grown)
    for name in ("prompts", "tokens", "bytes_written"):
        assert [one[name] for one in seen] == sorted(one[name] for one in seen)
    assert 0 < seen[-1]["prompts"] <= 120
    with harvest_stack.client() as client:
        client.delete(f"harvest/{job['job_id']}")


@pytest.mark.long
def test_two_runners_work_through_six_jobs_of_three_keys_in_the_order_of_the_work(harvest_stack: Stack) -> None:
    users = [harvest_stack.new_user(harvests_unfinished=2) for _ in range(3)]
    with another_runner(harvest_stack, "tiny") as other:
        jobs = [
            (user, submit(harvest_stack, user, **{**LONG, "prompts": LONG["prompts"][:40]}))
            for user in users
            for _ in range(2)
        ]
        for user, job in jobs:
            assert wait_for(harvest_stack, job["job_id"], user)["status"] == "done"
        for _, job in jobs:
            assert row(harvest_stack, job)["claims"] == 1
            claim = f'"harvest claimed", "job_id": "{job["job_id"]}"'
            assert sum(log.count(claim) for log in (harvest_stack.log("runner"), other.log_text())) == 1
        assert other.log_text().count("harvest claimed") >= 1
    ended = [Ran.of(user.id, read_job(harvest_stack, job["job_id"], user)) for user, job in jobs]
    for taken in ended:
        # Of all that waited when this one was taken it was the oldest of the User with the fewest running.
        waiting = [one for one in ended if one.submitted < taken.started <= one.started]
        assert min(waiting, key=lambda one: (one.busy(ended, at=taken.started), one.job_id)) == taken


@dataclass(frozen=True)
class Ran:
    """When a job of a User was submitted and ran."""

    user_id: int
    job_id: str
    submitted: datetime
    started: datetime
    ended: datetime

    @classmethod
    def of(cls, user_id: int, job: dict[str, Any]) -> "Ran":
        times = (datetime.fromisoformat(job[name]) for name in ("created_at", "started_at", "completed_at"))
        return cls(user_id, job["job_id"], *times)

    def busy(self, others: list["Ran"], *, at: datetime) -> int:
        """How many jobs of this one's User ran at that time."""
        return sum(one.user_id == self.user_id and one.started < at <= one.ended for one in others)


def test_a_job_that_only_the_row_tells_of_is_found(harvest_stack: Stack) -> None:
    """No message, the row alone, and a broker that dropped every connection: as after its restart without its data."""
    with Redis.from_url(harvest_stack.env["BROKER_URL"]) as broker:
        broker.client_kill_filter(_type="normal", skipme=True)
    code = """
from harvest.models import *
from harvest import services
services.tell_runners = lambda model: None
from accounts.models import User
from inference.models import BaseModel
plan = services.HarvestPlan(
    base_model_id=BaseModel.objects.get(name="tiny").pk, model="tiny", prompts=["Hello"], layers=(1,), shard_size=1,
    batch_size=None, add_special_tokens=True, directions=None, reserved_tokens=6, bytes_at_most=100_000,
)
result = str(services.submit_harvest(user=User.objects.get(pk=user_id), api_key=None, plan=plan).pk)
"""
    job_id = harvest_stack.django(code, user_id=harvest_stack.user.id)
    assert wait_for(harvest_stack, job_id, seconds=60)["status"] == "done"


def test_a_model_that_cannot_be_loaded_ends_the_job_with_one_sentence(
    harvest_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    for path in harvest_stack.tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "model.safetensors").write_bytes(b"not weights")
    harvest_stack.manage("addmodel", "broken", "--source", str(folder), "--dtype", "float32")
    with another_runner(harvest_stack, "broken"):
        job = submit(harvest_stack, model="broken", prompts=["Hello"])
        ended = wait_for(harvest_stack, job["job_id"])
        assert (ended["status"], ended["tokens"], ended["error"]) == ("failed", 0, "The model could not be loaded.")
        assert row(harvest_stack, job)["tries"] == 3


@pytest.mark.long
def test_a_model_in_bfloat16_gives_bfloat16(harvest_stack: Stack) -> None:
    harvest_stack.manage("addmodel", "tiny-bf16", "--source", str(harvest_stack.tiny_model), "--dtype", "bfloat16")
    texts = ["Hello", TEXT, TEXT * 40]
    with another_runner(harvest_stack, "tiny-bf16"):
        job = submit(harvest_stack, model="tiny-bf16", prompts=texts, layers="all")
        done = wait_for(harvest_stack, job["job_id"])
    truth = download(wait_for(harvest_stack, submit(harvest_stack, prompts=texts, layers="all")["job_id"]))
    result = done["result"]
    assert httpx.get(result["manifest_url"]).json()["dtype"] == "bfloat16"
    tensors = safetensors.torch.load(httpx.get(result["shard_urls"][0]).content)
    kept = []
    for index in range(3):
        values = tensors[f"prompt_{index}"]
        assert values.dtype == torch.bfloat16
        assert tensors[f"tokens_{index}"].tolist() == truth.ids[index]
        # A bfloat16 has 8 bits of mantissa; four layers of them stay within a few steps of the float32 stream.
        error = np.abs(values.float().numpy() - truth.values[index])
        assert np.median(error) < 2**-7 * np.abs(truth.values[index]).mean()
        kept.append(values[:, 1:].double().numpy())
    rows = np.concatenate(kept, axis=1)
    stats = safetensors.torch.load(httpx.get(result["stats_url"]).content)
    assert stats["count"].tolist() == [rows.shape[1]]
    mean, std = rows.mean(axis=1), rows.std(axis=1)
    assert (np.abs(stats["mean"].numpy() - mean) <= 1e-5 * (np.abs(mean) + std)).all()
    assert (np.abs(stats["std"].numpy() - std) <= 1e-5 * 2 * std).all()


@pytest.mark.long
def test_files_in_s3_are_read_by_presigned_links(harvest_stack: Stack, s3_server: S3Server) -> None:
    harvest_stack.env["STORAGE_URL"], folder = s3_server.url, harvest_stack.env["STORAGE_URL"]
    for name, value in (("AWS_ACCESS_KEY_ID", "tests-access"), ("AWS_SECRET_ACCESS_KEY", "tests-secret")):
        harvest_stack.env[name] = value
    try:
        for part in PARTS:
            harvest_stack.restart(part)
        texts = [TEXT * 30] * 40
        job = submit(harvest_stack, prompts=texts, layers="all", shard_size=30)
        harvest = download(wait_for(harvest_stack, job["job_id"]))
        assert_statistics(harvest, bos=0)
        # The larger shard went up in parts.
        assert harvest.manifest["shards"][0]["bytes"] > 8 * 1024 * 1024
        url = harvest.job["result"]["shard_urls"][0]
        assert url.startswith(s3_server.endpoint)
        assert "X-Amz-Expires=6048" in url or "X-Amz-Expires=6047" in url
        assert httpx.get(url.replace("shard_00000", "shard_00001")).status_code == 403
        assert httpx.get(url[:-4] + "0000").status_code == 403
    finally:
        harvest_stack.env["STORAGE_URL"] = folder
        for part in PARTS:
            harvest_stack.restart(part)


def _seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
