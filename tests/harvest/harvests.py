"""A harvest through the whole product, as a researcher has it: submitted, waited for, downloaded, checked."""

import hashlib
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from tests.stack import Stack, StackUser

type Array = npt.NDArray[np.float32]
LAYERS = 4
HIDDEN = 64
CONTEXT = 512


@dataclass(frozen=True)
class Harvest:
    """A done job with all its files: `values[i]` [layers, tokens, columns] and `ids[i]` of prompt i."""

    job: dict[str, Any]
    manifest: dict[str, Any]
    stats: dict[str, npt.NDArray[Any]]
    values: dict[int, Array]
    ids: dict[int, list[int]]


def submit(stack: Stack, user: StackUser | None = None, **fields: Any) -> dict[str, Any]:
    """Submit a job of the model `tiny`; return it as it was accepted."""
    with stack.client(user) as client:
        answer = client.post("harvest", json={"model": "tiny", **fields})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def read_job(stack: Stack, job_id: str, user: StackUser | None = None, *, wait: int = 0) -> dict[str, Any]:
    """Read a job."""
    with stack.client(user) as client:
        answer = client.get(f"harvest/{job_id}", params={"wait": wait})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait_for(
    stack: Stack, job_id: str, user: StackUser | None = None, *, until: set[str] | None = None, seconds: float = 240
) -> dict[str, Any]:
    """Wait for a job to end, or to have one of the statuses `until`."""
    until = until or {"done", "failed", "cancelled"}
    deadline = time.monotonic() + seconds
    while (job := read_job(stack, job_id, user, wait=10))["status"] not in until:
        assert time.monotonic() < deadline, job
    return job


def download(job: dict[str, Any]) -> Harvest:
    """Download all files of a done job by their links, without a key, and check each against the manifest."""
    assert job["status"] == "done", job
    result = job["result"]
    with httpx.Client(timeout=60) as client:
        manifest = client.get(result["manifest_url"]).raise_for_status().json()
        stats_file = client.get(result["stats_url"]).raise_for_status().content
        shards = [client.get(url).raise_for_status().content for url in result["shard_urls"]]
    assert len(shards) == result["n_shards"] == len(manifest["shards"])
    values: dict[int, Array] = {}
    ids: dict[int, list[int]] = {}
    for url, content, entry in zip(result["shard_urls"], shards, manifest["shards"], strict=True):
        assert unquote(urlsplit(url).path).rpartition("/")[2] == entry["key"].rpartition("/")[2]
        assert len(content) == entry["bytes"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        tensors = load(content)
        assert len(tensors) == 2 * len(entry["prompts"])
        for prompt in entry["prompts"]:
            index = prompt["index"]
            assert list(tensors[f"prompt_{index}"].shape) == prompt["shape"]
            values[index] = tensors[f"prompt_{index}"]
            ids[index] = tensors[f"tokens_{index}"].tolist()
    assert hashlib.sha256(stats_file).hexdigest() == manifest["stats"]["sha256"]
    assert (
        sorted(values)
        == list(range(job["n_prompts"]))
        == [p["index"] for s in manifest["shards"] for p in s["prompts"]]
    )
    return Harvest(job=job, manifest=manifest, stats=load(stats_file), values=values, ids=ids)


def assert_statistics(harvest: Harvest, *, bos: int | None) -> None:
    """Hold the statistics to NumPy's float64 over the shards: within 1e-5 of |value| + std."""
    kept = [
        harvest.values[index][:, 1 if ids and ids[0] == bos else 0 :].astype(np.float64)
        for index, ids in harvest.ids.items()
    ]
    rows = np.concatenate(kept, axis=1)
    stats = harvest.stats
    assert stats["count"].tolist() == [rows.shape[1]]
    if not rows.shape[1]:
        assert not any(stats[name].any() for name in ("mean", "std", "mean_token_norm"))
        return
    mean, std = rows.mean(axis=1), rows.std(axis=1)
    norm = np.sqrt((rows**2).sum(axis=2)).mean(axis=1)
    assert stats["mean"].shape == mean.shape
    assert (np.abs(stats["mean"] - mean) <= 1e-5 * (np.abs(mean) + std)).all()
    assert (np.abs(stats["std"] - std) <= 1e-5 * (std + std)).all()
    assert (np.abs(stats["mean_token_norm"] - norm) <= 1e-5 * norm).all()
