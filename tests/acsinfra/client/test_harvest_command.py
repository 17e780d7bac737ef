"""`acs harvest` against the real API, runner and files: split, waited for, downloaded, and gone on with."""

import asyncio
import hashlib
import json
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acsinfra.client import AcsError, AsyncClient, Client, Harvest, HarvestJob, open_harvest
from acsinfra.client.harvesting import HarvestRun
from acsinfra.client.watcher import Watcher
from tests.acsinfra.client.conftest import client_of, command_of, prompts
from tests.harvest.harvests import download, read_job
from tests.stack import Stack
from tests.tcp_proxy import TcpProxy, proxy_to

RAISE_QUOTA = """
from accounts.models import User
result = User.objects.filter(pk=pk).update(storage_quota_bytes=10**9)
"""
ONE_AT_ONCE: dict[str, Any] = {"harvests_unfinished": None}


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every safetensors file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def used_tokens(stack: Stack, user: Any) -> int:
    with client_of(stack, user) as client:
        found = client.budget()
        assert found.held == 0
        return found.used


def test_a_corpus_larger_than_a_job_is_harvested_with_one_unfinished_job_at_a_time(
    harvest_stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    user = harvest_stack.new_user(**ONE_AT_ONCE)
    acs, out = command_of(harvest_stack, user), tmp_path / "out"
    arguments = ("harvest", corpus, "--model", "tiny", "--layers", "3,0-1", "--out", out, "--job-size", "9")
    plan = acs.json(*arguments, "--dry-run")
    assert (plan["n_prompts"], plan["n_jobs"]) == (23, 3)
    summary = acs.json(*arguments, "--shard-size", "4")
    assert (summary["layers"], summary["n_prompts"], len(summary["jobs"])) == ([0, 1, 3], 23, 3)
    assert summary["charged_tokens"] == summary["n_tokens"] == used_tokens(harvest_stack, user)
    opened = open_harvest(out)
    assert (opened.model, opened.layers, len(opened), opened.n_tokens) == ("tiny", (0, 1, 3), 23, summary["n_tokens"])
    # Against the files as the API's links give them.
    for job, first in zip(summary["jobs"], (0, 9, 18), strict=True):
        reference = download(read_job(harvest_stack, job["job_id"], user))
        for index, values in reference.values.items():
            prompt = opened.prompt(first + index)
            assert np.array_equal(prompt.values, values)
            assert prompt.token_ids.tolist() == reference.ids[index]
    # Again: nothing new, nothing charged, and the same answer.
    assert acs.json(*arguments, "--shard-size", "4") == summary
    assert used_tokens(harvest_stack, user) == summary["n_tokens"]
    other = acs.json(*arguments, "--shard-size", "5", exit_code=2)
    assert "other options" in other["error"]["message"]


def test_killed_wherever_it_is_the_same_command_goes_on_and_each_job_is_charged_once(
    harvest_stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    user = harvest_stack.new_user()
    acs = command_of(harvest_stack, user)

    def arguments(out: Path) -> tuple[str | Path, ...]:
        options = ("--layers", "all", "--job-size", "8", "--shard-size", "2", "--connections", "1")
        return ("harvest", corpus, "--model", "tiny", "--out", out, *options)

    undisturbed = acs.json(*arguments(tmp_path / "whole"))
    charged = used_tokens(harvest_stack, user)
    assert charged == undisturbed["n_tokens"]
    out = tmp_path / "killed"
    for has_come_to in (_has_submitted, _has_a_shard, _has_two_manifests):
        process = acs.start(*arguments(out))
        while not has_come_to(out) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    summary = acs.json(*arguments(out))
    assert len({job["job_id"] for job in summary["jobs"]}) == 3
    assert used_tokens(harvest_stack, user) == 2 * charged
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not list(out.rglob("*.part"))
    # As after a kill between the server's answer and our note of it, seen long after the job was done.
    state = json.loads((out / "harvest.json").read_text())
    state["parts"][1] |= {"job_id": None, "status": None, "tokens": None, "is_downloaded": False}
    (out / "harvest.json").write_text(json.dumps(state))
    shutil.rmtree(out / "prompts_000000008")
    assert acs.json(*arguments(out)) == summary
    assert files_of(out) == files_of(tmp_path / "whole")
    assert used_tokens(harvest_stack, user) == 2 * charged
    with client_of(harvest_stack, user) as client:
        assert len(client.harvest_jobs(limit=100)) == 6


def test_files_that_were_lost_or_damaged_are_fetched_again(harvest_stack: Stack, corpus: Path, tmp_path: Path) -> None:
    user = harvest_stack.new_user()
    acs = command_of(harvest_stack, user)
    out = tmp_path / "harvest"
    arguments = ("harvest", corpus, "--model", "tiny", "--job-size", "12", "--shard-size", "4", "--out", out)
    summary = acs.json(*arguments)
    files, charged = files_of(out), used_tokens(harvest_stack, user)
    first, second = (out / f"prompts_{number:09}" for number in (0, 12))
    (first / "shard_00001.safetensors").unlink()
    (first / "shard_00000.safetensors").write_bytes(b"cut")
    flip_last_byte(first / "shard_00002.safetensors")
    (second / "manifest.json").write_bytes(b"{")
    assert acs.json(*arguments) == summary
    assert files_of(out) == files
    shutil.rmtree(second)
    assert acs.json(*arguments) == summary
    assert files_of(out) == files
    assert used_tokens(harvest_stack, user) == charged
    flip_last_byte(first / "shard_00002.safetensors")
    assert "delete it" in acs.json("verify", out, exit_code=7)["error"]["message"]
    job = summary["jobs"][0]["job_id"]
    acs.json("jobs", "download", job, "--out", first)
    assert files_of(out) == files


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_directions_of_a_file_give_projections_of_what_the_async_client_harvests(
    harvest_stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    user = harvest_stack.new_user()
    directions = np.random.default_rng(7).normal(0, 30, (5, 64)).astype(np.float32)
    np.save(tmp_path / "probes.npy", directions)
    arguments = ("harvest", corpus, "--model", "tiny", "--layers", "1,3", "--job-size", "12")
    out = tmp_path / "projected"
    summary = command_of(harvest_stack, user).json(*arguments, "--project-onto", tmp_path / "probes.npy", "--out", out)
    assert (summary["contents"], summary["layers"], len(summary["jobs"])) == ("projections", [1, 3], 2)

    async def read_unprojected() -> tuple[Harvest, Harvest]:
        async with AsyncClient(f"{harvest_stack.base_url}/v1", user.key) as client:
            submit = partial(client.submit_harvest, prompts(23), model="tiny", layers=[1, 3], idempotency_key="one")
            job, same = await asyncio.gather(submit(), submit())
            assert job.id == same.id
            done = await client.wait_for_harvest(job.id, timeout_s=120)
            assert (done.status, (await client.cancel_harvest(job.id)).status) == ("done", "done")
            assert [one.id for one in await client.harvest_jobs(limit=1)] == [job.id]
            one_job = await client.download_harvest(job.id, tmp_path / "one job")
            harvest = partial(client.harvest, prompts(23), tmp_path / "corpus", model="tiny", layers=[1, 3])
            harvesting = asyncio.create_task(harvest())
            while not _has_submitted(tmp_path / "corpus"):
                assert not harvesting.done()
                await asyncio.sleep(0.002)
            harvesting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await harvesting
            return one_job, await harvest()

    one_job, whole = asyncio.run(read_unprojected())
    projected = open_harvest(out)
    assert (projected.contents, len(projected), len(whole)) == ("projections", 23, 23)
    # Cancelled and called again, it was charged once.
    assert used_tokens(harvest_stack, user) == 3 * projected.n_tokens
    exact = directions.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    for prompt in projected:
        stream = whole.prompt(prompt.index).values.astype(np.float64)
        assert np.allclose(one_job.prompt(prompt.index).values, stream, rtol=1e-5, atol=1e-5)
        assert prompt.values.dtype == np.float32
        assert prompt.values.shape == (2, len(prompt.token_ids), 5)
        # Of the vector's length, as a component may be near zero.
        bound = 1e-5 * np.linalg.norm(stream, axis=2, keepdims=True)
        assert (np.abs(prompt.values - stream @ exact.T) <= bound).all()


def _has_submitted(out: Path) -> bool:
    state = out / "harvest.json"
    return state.exists() and any(part["submitted_at"] for part in json.loads(state.read_text())["parts"])


def _has_a_shard(out: Path) -> bool:
    return any(out.rglob("shard_*"))


def _has_two_manifests(out: Path) -> bool:
    return len(list(out.rglob("manifest.json"))) >= 2


class _Cutter(Watcher):
    """Cuts every connection to the server a few times: when a job is looked at, and in the middle of a file."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy
        self._looks, self._chunks = iter(range(4)), iter(range(60))

    def job_changed(self, part: Any, job: Any) -> None:
        if next(self._looks, None) is not None:
            self._cut()

    def bytes_arrived(self, count: int) -> None:
        if (next(self._chunks, None) or 0) % 20 == 19:
            self._cut()

    def _cut(self) -> None:
        self._proxy.cut()
        self._proxy.mend()


def test_lost_connections_are_outlived_while_waiting_and_while_downloading(
    harvest_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = harvest_stack.new_user()
    with proxy_to(harvest_stack.port) as proxy:
        client = client_of(harvest_stack, user, port=proxy.port)
        # The API's links lead to itself: here they lead through the proxy too.
        answer = client.harvest_job
        through = (f":{harvest_stack.port}/", f":{proxy.port}/")

        def harvest_job(job_id: str, **options: Any) -> HarvestJob:
            return HarvestJob.from_json(json.loads(json.dumps(answer(job_id, **options).raw).replace(*through)))

        monkeypatch.setattr(Client, "harvest_job", lambda _, job_id, **options: harvest_job(job_id, **options))
        lines = [sentence * 40 for sentence in prompts(12)]
        watcher = _Cutter(proxy)
        run = HarvestRun(
            client,
            lines,
            tmp_path,
            model="tiny",
            options={"layers": "all"},
            watcher=watcher,
            job_size=6,
            n_connections=1,
        )
        state = run.run()
    assert next(watcher._looks, None) is None
    assert next(watcher._chunks, None) is None
    assert [part.status for part in state.parts] == ["done", "done"]
    opened = open_harvest(tmp_path)
    assert used_tokens(harvest_stack, user) == opened.n_tokens
    opened.verify()


def test_a_corrupted_download_is_found(harvest_stack: Stack, tmp_path: Path) -> None:
    with client_of(harvest_stack) as client:
        out = tmp_path / "out"
        opened = client.harvest(prompts(5), out, model="tiny", layers=[2], shard_size=2)
        (job,) = json.loads((out / "harvest.json").read_text())["parts"]
        folder = out / "prompts_000000000"
        shard = folder / "shard_00001.safetensors"
        right = shard.read_bytes()
        # On this disk.
        wrong = bytearray(right)
        wrong[-1] ^= 1
        shard.write_bytes(wrong)
        with pytest.raises(AcsError, match="shard_00001") as found:
            opened.verify()
        assert found.value.code == "corrupted_download"
        assert command_of(harvest_stack).json("verify", out, exit_code=7)["error"]["code"] == "corrupted_download"
        # In what an interrupted download had written: fetched again from its beginning.
        again = tmp_path / "again"
        again.mkdir()
        (again / "shard_00001.safetensors.part").write_bytes(bytes(wrong[:-1]))
        (again / "shard_00000.safetensors.part").write_bytes(b"x" * 10)
        (again / "shard_00002.safetensors.part").write_bytes(b"x" * 1_000_000)
        client.download_harvest(job["job_id"], again).verify()
        assert (again / "shard_00001.safetensors").read_bytes() == right
        # On the server: never taken for the harvest.
        (stored,) = harvest_stack.files.rglob(f"*{_run_id(folder)}*/shard_00001.safetensors")
        stored.write_bytes(wrong)
        third = tmp_path / "third"
        with pytest.raises(AcsError, match="SHA-256") as refused:
            client.download_harvest(job["job_id"], third)
        assert refused.value.code == "corrupted_download"
        assert not (third / "shard_00001.safetensors").exists()
        assert not (third / "manifest.json").exists()
        stored.write_bytes(right)
        client.download_harvest(job["job_id"], third).verify()


def test_what_is_too_large_is_split_and_a_refusal_loses_nothing(harvest_stack: Stack, tmp_path: Path) -> None:
    # Room for about 3 of the 8 prompts: a run may write 64 KiB beside its tokens.
    lines = [sentence[:200].ljust(200, "x") for sentence in prompts(8)]
    room = 3 * 201 * 4 * (64 + 1) * 4 + 2 * 64 * 1024
    user = harvest_stack.new_user(storage_quota_bytes=room)
    with client_of(harvest_stack, user) as client:
        with pytest.raises(AcsError, match="storage has room") as refused:
            client.harvest(lines, tmp_path, model="tiny", layers="all")
        assert refused.value.code == "corpus_too_large"
        part = open_harvest(tmp_path, allow_partial=True)
        assert 0 < len(part) < 8
        assert part[0].index == 0
        harvest_stack.django(RAISE_QUOTA, pk=user.id)
        whole = client.harvest(lines, tmp_path, model="tiny", layers="all")
        assert [prompt.index for prompt in whole] == list(range(8))
        assert used_tokens(harvest_stack, user) == whole.n_tokens


def _run_id(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["shards"][0]["key"]).split("/")[-2]
