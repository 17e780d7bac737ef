"""Reading a harvest from the disk: by prompt, by layer, in shuffled batches, as NumPy and as torch."""

import hashlib
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from acsinfra.client import AcsError, Harvest, open_harvest, torch_data
from acsinfra.client.run_state import Part, RunState, save_state

HIDDEN = 5
LAYERS = (2, 7)
LENGTHS = (3, 1, 8, 2, 6)


def write_job(folder: Path, lengths: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the files of one job as a runner does, two prompts in each shard."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(LAYERS), length, HIDDEN, generator=random).to(dtype) for length in lengths]
    shards = []
    for number, first in enumerate(range(0, len(lengths), 2)):
        path = folder / f"shard_{number:05}.safetensors"
        indexes = range(first, min(first + 2, len(lengths)))
        tensors = {f"prompt_{index}": values[index] for index in indexes}
        tensors |= {f"tokens_{i}": torch.arange(lengths[i], dtype=torch.int32) + 100 * i for i in indexes}
        save_file(tensors, path)
        described = [{"index": i, "shape": list(values[i].shape), "cut": i == 2} for i in indexes]
        shards.append({"key": f"harvest/x/{path.name}", **_facts(path), "prompts": described})
    whole = torch.cat([value.double() for value in values], dim=1)
    stats = {
        "mean": whole.mean(1).float(),
        "std": whole.std(1, correction=0).float(),
        "mean_token_norm": whole.norm(dim=2).mean(1).float(),
        "count": torch.tensor([whole.shape[1]]),
    }
    save_file(stats, folder / "stats.safetensors")
    manifest = {
        "layout_version": 1,
        "model": "tiny",
        "checkpoint": "tiny-1",
        "dtype": "bfloat16",
        "contents": "activations",
        "layer_indices": list(LAYERS),
        "shards": shards,
        "stats": _facts(folder / "stats.safetensors"),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _facts(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a harvest of two jobs in bfloat16, 3 and 2 prompts."""
    root = tmp_path / "harvest"
    parts = [Part(0, 3, "a", job_id="1", status="done"), Part(3, 2, "b", job_id="2", status="done")]
    write_job(root / parts[0].folder_name, LENGTHS[:3], seed=0)
    write_job(root / parts[1].folder_name, LENGTHS[3:], seed=1)
    save_state(root, RunState("tiny", {}, 5, "", parts))
    return root


@pytest.fixture
def harvest(folder: Path) -> Harvest:
    return open_harvest(folder)


def test_prompts_of_all_jobs_are_views_of_the_files(harvest: Harvest) -> None:
    assert (len(harvest), harvest.n_tokens, harvest.width, harvest.layers) == (5, sum(LENGTHS), HIDDEN, LAYERS)
    assert [len(prompt.token_ids) for prompt in harvest] == list(LENGTHS)
    prompt = harvest.prompt(4)
    assert (prompt.index, prompt.values.shape, prompt.values.dtype) == (4, (2, 6, HIDDEN), ml_dtypes.bfloat16)
    assert prompt.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert np.array_equal(prompt.layer(7), prompt.values[1])
    assert not prompt.values.flags.writeable
    assert not prompt.values.flags.owndata
    assert [harvest[2].is_cut, harvest[-1].index, len(harvest[1:4])] == [True, 4, 3]
    expected = torch.randn(2, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert np.array_equal(harvest[3].values.astype(np.float32), expected.float().numpy())
    for missing in (5, -6):
        with pytest.raises(IndexError):
            harvest[missing]
    with pytest.raises(AcsError, match="Layer 3 was not harvested"):
        prompt.layer(3)


def test_a_layer_is_its_prompts_end_to_end(harvest: Harvest) -> None:
    layer = harvest.layer(7)
    rows = layer.numpy(np.float32)
    assert rows.shape == (sum(LENGTHS), HIDDEN)
    assert len(layer.token_ids()) == len(rows)
    assert np.array_equal(rows[3:4], layer[1].astype(np.float32))
    tensor = layer.torch()
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.float().numpy(), rows)


def test_statistics_are_those_of_all_jobs_together(harvest: Harvest) -> None:
    rows = np.stack([harvest.layer(layer).numpy(np.float64) for layer in LAYERS])
    assert harvest.statistics.count == sum(LENGTHS)
    assert np.allclose(harvest.statistics.mean, rows.mean(1), atol=1e-6)
    assert np.allclose(harvest.statistics.std, rows.std(1), atol=1e-6)
    assert np.allclose(harvest.statistics.mean_token_norm, np.linalg.norm(rows, axis=2).mean(1), atol=1e-6)


@pytest.mark.parametrize("shuffle_buffer", [0, 4, 1000])
@pytest.mark.parametrize("skip_first", [0, 1])
def test_batches_hold_every_token_once_beside_its_id(harvest: Harvest, shuffle_buffer: int, skip_first: int) -> None:
    options: dict[str, Any] = {"layer": 7, "batch_size": 4, "shuffle_buffer": shuffle_buffer, "skip_first": skip_first}
    batches = list(harvest.token_batches(**options, seed=3))
    assert {len(batch) for batch in batches[:-1]} <= {4}
    seen = [
        (int(prompt), int(position))
        for batch in batches
        for prompt, position in zip(batch.prompts, batch.positions, strict=True)
    ]
    everything = [(prompt, at) for prompt, length in enumerate(LENGTHS) for at in range(skip_first, length)]
    assert sorted(seen) == everything
    assert (seen == everything) == (shuffle_buffer == 0)
    for batch in batches:
        for values, token_id, prompt, at in zip(
            batch.values, batch.token_ids, batch.prompts, batch.positions, strict=True
        ):
            assert np.array_equal(values, harvest[int(prompt)].layer(7)[at])
            assert token_id == harvest[int(prompt)].token_ids[at]
    again = list(harvest.token_batches(**options, seed=3))
    assert all(np.array_equal(a.values, b.values) for a, b in zip(batches, again, strict=True))
    full = list(harvest.token_batches(**options, drop_last=True, dtype=np.float32))
    assert {(len(batch), str(batch.values.dtype)) for batch in full} == {(4, "float32")}


def test_batches_refuse_wrong_arguments_at_once(harvest: Harvest) -> None:
    for layer, batch_size in ((3, 4), (7, 0)):
        with pytest.raises(AcsError):
            harvest.token_batches(layer=layer, batch_size=batch_size)


def _places(batches: Iterable[dict[str, torch.Tensor]]) -> list[tuple[int, int]]:
    return [
        (int(prompt), int(at))
        for batch in batches
        for prompt, at in zip(batch["prompts"], batch["positions"], strict=True)
    ]


def test_a_torch_dataset_of_batches_has_another_order_each_epoch(harvest: Harvest) -> None:
    dataset = harvest.torch_dataset(layer=2, batch_size=4)
    loader = DataLoader(dataset, batch_size=None)
    assert next(iter(loader))["values"].dtype == torch.bfloat16
    first = _places(loader)
    assert _places(loader) == first
    dataset.set_epoch(1)
    second = _places(loader)
    assert len(first) == sum(LENGTHS)
    assert sorted(first) == sorted(second)
    assert first != second


def test_workers_of_a_loader_share_the_prompts(harvest: Harvest, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = harvest.torch_dataset(layer=2, batch_size=4)
    shares = []
    for number in range(2):
        monkeypatch.setattr(torch_data, "get_worker_info", lambda n=number: SimpleNamespace(id=n, num_workers=2))
        # As a worker gets it.
        shares.append({prompt for prompt, _ in _places(pickle.loads(pickle.dumps(dataset)))})
    assert shares == [{0, 2, 4}, {1, 3}]


def test_a_torch_dataset_of_prompts(harvest: Harvest) -> None:
    dataset = harvest.torch_prompts()
    item = dataset[2]
    assert (len(dataset), item["values"].shape, item["index"]) == (5, (2, 8, HIDDEN), 2)
    assert (item["values"].dtype, item["token_ids"].dtype) == (torch.bfloat16, torch.int32)


def test_what_is_not_whole_is_refused_with_what_to_do(folder: Path, harvest: Harvest) -> None:
    second = folder / "prompts_000000003"
    (second / "manifest.json").rename(second / "hidden")
    with pytest.raises(AcsError, match="1 of 2 jobs") as refused:
        open_harvest(folder)
    assert refused.value.code == "harvest_incomplete"
    part = open_harvest(folder, allow_partial=True)
    assert (len(part), part.prompt(2).index) == (3, 2)
    with pytest.raises(IndexError):
        part.prompt(3)
    (second / "hidden").rename(second / "manifest.json")
    shard = second / "shard_00000.safetensors"
    content = shard.read_bytes()
    for broken in (b"", content[:4], content[:20], content[:-1], b"\xff" * len(content)):
        shard.write_bytes(broken)
        with pytest.raises(AcsError) as corrupted:
            open_harvest(folder)[3]
        assert corrupted.value.code == "corrupted_download"
    shard.unlink()
    with pytest.raises(AcsError, match="is missing"):
        harvest[3]
    with pytest.raises(AcsError, match="no harvest"):
        open_harvest(folder.parent)


def test_the_files_of_one_job_open_by_themselves(folder: Path) -> None:
    opened = open_harvest(folder / "prompts_000000003")
    assert [prompt.index for prompt in opened] == [0, 1]
    opened.verify()
