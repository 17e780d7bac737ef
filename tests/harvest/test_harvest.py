"""A harvest through the API, a runner and the files, against HuggingFace and NumPy."""

import re
from datetime import datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.harvest.harvests import CONTEXT, HIDDEN, assert_statistics, download, submit, wait_for
from tests.inference.engine.reference import ReferenceModel
from tests.inference.tensor_json import tensor_json
from tests.stack import Stack

TEXT = "The residual stream carries what each block adds; rain fell on the harbour, 日本 👩‍🚀 Łódź. "
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")


@pytest.fixture(scope="module")
def tokenizer(harvest_stack: Stack) -> Tokenizer:
    return Tokenizer.from_file(str(harvest_stack.tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def bos(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id("<s>")
    assert isinstance(token_id, int)
    return token_id


@pytest.fixture(scope="module")
def ragged(tokenizer: Tokenizer) -> list[str]:
    """Return texts of one token, of every block's edge, of the context, and past it."""
    texts = ["H", TEXT, "\n", "a" * 31, "x y z " * 11, TEXT * 12, TEXT * 20]
    texts += [TEXT[start : start + 7 * start + 1] for start in range(1, 12)]
    return texts


@pytest.mark.parametrize("shard_size", [1, 3, 4096])
def test_values_ids_and_statistics_are_right_whatever_the_shard_size(
    harvest_stack: Stack,
    tokenizer: Tokenizer,
    bos: int,
    reference: ReferenceModel,
    ragged: list[str],
    shard_size: int,
) -> None:
    job = submit(harvest_stack, prompts=ragged, layers="all", shard_size=shard_size)
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    assert harvest.job["result"]["n_shards"] == -(-len(ragged) // shard_size)
    lengths = []
    for index, text in enumerate(ragged):
        expected = tokenizer.encode(text).ids
        assert harvest.ids[index] == expected[: CONTEXT - 1]
        is_cut = harvest.manifest["shards"][index // shard_size]["prompts"][index % shard_size]["cut"]
        assert is_cut == (len(expected) > CONTEXT - 1)
        values = harvest.values[index]
        assert values.dtype == np.float32
        stream = reference.read(harvest.ids[index]).stream
        assert values.shape == stream.shape == (4, len(harvest.ids[index]), HIDDEN)
        assert np.abs(values - stream).max() <= 1e-4 * np.abs(stream).max()
        lengths.append(len(expected))
    assert max(lengths) > CONTEXT - 1
    assert harvest.job["tokens"] == harvest.job["result"]["tokens"] == sum(map(len, harvest.ids.values()))
    assert_statistics(harvest, bos=bos)


def test_layers_ascend_repeats_are_read_once_and_each_is_its_own(harvest_stack: Stack) -> None:
    texts = ["Hot water freezes", "faster than cold"]
    whole = download(wait_for(harvest_stack, submit(harvest_stack, prompts=texts, layers="all")["job_id"]))
    for layers, expected in (([3, 0, 3], [0, 3]), ([2], [2]), (None, [1, 2, 3])):
        job = submit(harvest_stack, prompts=texts, layers=layers)
        assert job["layers"] == expected
        part = download(wait_for(harvest_stack, job["job_id"]))
        assert part.job["result"]["layer_indices"] == part.manifest["layer_indices"] == expected
        for index in range(2):
            assert np.abs(part.values[index] - whole.values[index][expected]).max() < 1e-5


def test_without_special_tokens_only_a_text_that_begins_with_bos_has_it_left_out(
    harvest_stack: Stack, tokenizer: Tokenizer, bos: int, reference: ReferenceModel
) -> None:
    texts = ["<s>The sky is blue", "The grass is not", "<s>", "H"]
    job = submit(harvest_stack, prompts=texts, layers="all", add_special_tokens=False)
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    for index, text in enumerate(texts):
        assert harvest.ids[index] == tokenizer.encode(text, add_special_tokens=False).ids
        stream = reference.read(harvest.ids[index]).stream
        assert np.abs(harvest.values[index] - stream).max() <= 1e-4 * np.abs(stream).max()
    assert [len(harvest.ids[index]) for index in (2, 3)] == [1, 1]
    assert [harvest.ids[index][0] == bos for index in range(4)] == [True, False, True, False]
    assert harvest.manifest["add_special_tokens"] is False
    assert_statistics(harvest, bos=bos)


def test_statistics_are_zeros_when_nothing_is_left(harvest_stack: Stack, bos: int) -> None:
    job = submit(harvest_stack, prompts=["<s>", "<s>"], add_special_tokens=False)
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    assert harvest.ids == {0: [bos], 1: [bos]}
    assert harvest.stats["mean"].shape == (3, HIDDEN)
    assert_statistics(harvest, bos=bos)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_projections_are_the_stream_along_directions_of_length_one(harvest_stack: Stack, bos: int, dtype: str) -> None:
    texts = ["Many hands make light work", "but too many cooks spoil the broth", TEXT * 3]
    given = np.random.default_rng(5).normal(0, 30, (3, HIDDEN)).astype(dtype)
    whole = download(wait_for(harvest_stack, submit(harvest_stack, prompts=texts)["job_id"]))
    job = submit(harvest_stack, prompts=texts, project_onto=tensor_json(given), shard_size=2)
    harvest = download(wait_for(harvest_stack, job["job_id"]))
    assert harvest.job["result"]["contents"] == harvest.manifest["contents"] == "projections"
    assert harvest.manifest["projections"] == {"normalized": True, "directions": 3}
    exact = given.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    for index in range(3):
        stream = whole.values[index].astype(np.float64)
        expected = stream @ exact.T
        assert harvest.values[index].dtype == np.float32
        # Of the vector's length, as a component may be near zero.
        bound = 1e-5 * np.linalg.norm(stream, axis=2, keepdims=True)
        assert (np.abs(harvest.values[index] - expected) <= bound).all()
    assert_statistics(harvest, bos=bos)


def test_a_done_job_says_what_the_contract_says(harvest_stack: Stack) -> None:
    texts = ["é", "日本", "Hello"]
    accepted = submit(harvest_stack, prompts=texts, batch_size=8, shard_size=2)
    base = {
        "job_id",
        "run_id",
        "status",
        "model",
        "n_prompts",
        "reserved_tokens",
        "layers",
        "tokens",
        "created_at",
        "started_at",
        "completed_at",
    }
    assert set(accepted) == base
    assert (accepted["status"], accepted["tokens"], accepted["started_at"]) == ("pending", None, None)
    assert (accepted["n_prompts"], accepted["reserved_tokens"]) == (3, 3 + 7 + 6)
    job = wait_for(harvest_stack, accepted["job_id"])
    assert set(job) == base | {"result", "urls_expire_at"}
    assert {name: job[name] for name in ("job_id", "run_id", "model", "created_at", "layers")} == {
        name: accepted[name] for name in ("job_id", "run_id", "model", "created_at", "layers")
    }
    for name in ("created_at", "started_at", "completed_at", "urls_expire_at"):
        assert TIME.fullmatch(job[name])
    assert job["created_at"] <= job["started_at"] <= job["completed_at"]
    left = datetime.fromisoformat(job["urls_expire_at"]) - datetime.now().astimezone()
    assert timedelta(days=6, hours=23) < left <= timedelta(days=7)
    result = job["result"]
    assert set(result) == {
        "n_shards",
        "layer_indices",
        "manifest_url",
        "shard_urls",
        "stats_url",
        "contents",
        "tokens",
        "bytes_written",
        "timings",
    }
    assert set(result["timings"]) == {"load_s", "forward_s", "save_s", "upload_s", "other_s"}
    started, completed = (datetime.fromisoformat(job[name]) for name in ("started_at", "completed_at"))
    assert sum(result["timings"].values()) <= (completed - started).total_seconds() + 0.1
    assert 0 < job["tokens"] <= job["reserved_tokens"]
    harvest = download(job)
    manifest = harvest.manifest
    assert manifest["layout_version"] == 1
    for name in ("job_id", "run_id", "model", "n_prompts"):
        assert manifest[name] == job[name]
    assert (manifest["batch_size"], manifest["shard_size"], manifest["dtype"]) == (8, 2, "float32")
    assert manifest["checkpoint"] == harvest_stack.tiny_model.name
    assert "hidden_states" in manifest["layer_convention"]
    assert "BOS" in manifest["statistics"]
    with httpx.Client() as client:
        urls = [*result["shard_urls"], result["stats_url"], result["manifest_url"]]
        assert result["bytes_written"] == sum(len(client.get(url).content) for url in urls)


def test_each_answer_has_new_links_that_end(harvest_stack: Stack) -> None:
    job = wait_for(harvest_stack, submit(harvest_stack, prompts=["Hello"])["job_id"])
    url = job["result"]["shard_urls"][0]
    assert url.startswith(f"{harvest_stack.base_url}/files/")
    with httpx.Client() as client:
        assert client.get(url, headers={"Range": "bytes=0-7"}).status_code == 206
        assert client.head(url).headers["Content-Length"] == str(len(client.get(url).content))
        tampered = client.get(url.replace("/files/", "/files/A"))
        assert tampered.status_code == 403
        assert tampered.json()["error"]["type"] == "invalid_request_error"
    again = wait_for(harvest_stack, job["job_id"])
    assert again["urls_expire_at"] >= job["urls_expire_at"]


def test_a_done_job_loses_its_links_with_its_files(harvest_stack: Stack) -> None:
    job = wait_for(harvest_stack, submit(harvest_stack, prompts=["Hello"])["job_id"])
    code = "from harvest.services import *; delete_files(job_id=job_id); result = delete_unneeded_files()"
    harvest_stack.django(code, job_id=job["job_id"])
    after = wait_for(harvest_stack, job["job_id"])
    assert (after["status"], after["tokens"]) == ("done", job["tokens"])
    assert "result" not in after
    assert "urls_expire_at" not in after
    assert httpx.get(job["result"]["manifest_url"]).status_code == 404


def test_one_engine_serves_job_after_job(harvest_stack: Stack) -> None:
    results: list[dict[str, Any]] = []
    for _ in range(2):
        job = wait_for(harvest_stack, submit(harvest_stack, prompts=["Hello"])["job_id"])
        results.append(job["result"])
    assert results[1]["timings"]["load_s"] < 0.5
