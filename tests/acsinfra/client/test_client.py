"""`Client`, `AsyncClient` and the command, against the real API and engine."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from acsinfra.client import AcsError, AsyncClient, Client, decode_tensor, encode_tensor, steering_vector
from tests.acsinfra.client.conftest import client_of, command_of
from tests.stack import Stack
from tests.tcp_proxy import proxy_to

PROMPT = "The capital of France is"
FEW_TOKENS = """
from budgets.models import MonthlyLimit
result = MonthlyLimit.objects.update_or_create(user_id=pk, defaults={"monthly_tokens": 3})[1]
"""
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}


def test_a_completion_whole_streamed_async_and_from_the_command(inference_stack: Stack) -> None:
    acs = command_of(inference_stack)
    with client_of(inference_stack) as client:
        whole = client.complete(PROMPT, **GREEDY)
        assert (whole.prompt_tokens, whole.completion_tokens) == (whole.raw["usage"]["prompt_tokens"], 6)
        chunks = list(client.stream(PROMPT, **GREEDY))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        usage = chunks[-1].usage
        assert usage is not None
        assert usage["completion_tokens"] == 6
        several = client.complete([PROMPT, "The sky"], **GREEDY)
        assert [choice.index for choice in several.choices] == [0, 1]

    async def both() -> tuple[str, str, int]:
        async with AsyncClient(f"{inference_stack.base_url}/v1", inference_stack.user.key) as aio:
            texts = await asyncio.gather(*(aio.complete(PROMPT, **GREEDY) for _ in range(3)))
            streamed = "".join([chunk.text async for chunk in aio.stream(PROMPT, **GREEDY)])
            job = await aio.submit_job(PROMPT, **GREEDY)
            done = await aio.wait_for_job(job.id, timeout_s=200)
            assert {completion.text for completion in texts} == {done.text}
            return done.text, streamed, (await aio.budget()).remaining

    text, streamed, remaining = asyncio.run(both())
    assert text == streamed == whole.text
    assert remaining > 0
    arguments = ("complete", PROMPT, "-m", "tiny", "-n", "6", "-t", "0")
    printed = acs.run(*arguments)
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, f"{whole.text}\n", "")
    assert acs.json(*arguments, "-f", "logprobs=2")["choices"][0]["logprobs"]["tokens"]
    assert acs.run("complete", "-", *arguments[2:], stdin=PROMPT).stdout == f"{whole.text}\n"


def test_layers_come_as_arrays_and_steering_vectors_go_as_them(inference_stack: Stack, tmp_path: Path) -> None:
    acs = command_of(inference_stack)
    with client_of(inference_stack) as client:
        plain = client.complete(PROMPT, **GREEDY, output_residual_stream=[1, 3])
        stream = plain.residual_stream
        assert stream is not None
        assert stream.shape == (2, plain.prompt_tokens + 5, 64)
        assert stream.dtype == np.float32
        assert client.complete(PROMPT, **GREEDY).residual_stream is None
        vector = np.random.default_rng(0).normal(0, 3, 64).astype(np.float32)
        steered = client.complete(
            PROMPT, **GREEDY, output_residual_stream=[1], steering_vectors=[steering_vector(vector, 1, scale=2.0)]
        ).residual_stream
        assert steered is not None
        assert np.allclose(steered[0, :3], stream[0, :3] + 2 * vector, atol=1e-4)
        same = client.complete(PROMPT, **GREEDY, steering_vectors=[steering_vector(torch.tensor(vector), [1], scale=0)])
        assert same.text == plain.text
    save_file({"joy": vector, "other": vector}, tmp_path / "vectors.safetensors")
    out = tmp_path / "stream.npy"
    ended = acs.run(
        *("complete", PROMPT, "-m", "tiny", "-n", "6", "-t", "0", "--layers", "1", "--save", out),
        *("--steer", f"{tmp_path}/vectors.safetensors:joy", "--steer-layers", "1", "--steer-scale", "2"),
    )
    assert ended.returncode == 0, ended.stderr
    assert np.allclose(np.load(out)[0, :3], stream[0, :3] + 2 * vector, atol=1e-4)
    unnamed = acs.run("complete", "x", "-m", "tiny", "--steer", tmp_path / "vectors.safetensors", "--steer-layers", "1")
    assert (unnamed.returncode, "joy, other" in unnamed.stderr) == (2, True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("compress", [True, False])
def test_tensors_survive_the_wire(dtype: Any, compress: bool) -> None:
    array = np.random.default_rng(1).normal(0, 10, (3, 4, 5)).astype(dtype)
    wire = json.loads(json.dumps(encode_tensor(array, compress=compress)))
    assert np.array_equal(decode_tensor(wire), array)
    assert decode_tensor(wire).dtype == array.dtype
    as_torch = torch.tensor(array.astype(np.float32)).to(getattr(torch, np.dtype(dtype).name))
    assert encode_tensor(as_torch, compress=compress) == wire


def test_tensors_that_are_none_are_refused() -> None:
    for wrong in ([], [float("nan")], ["a"], np.array(["a"]), {"a": 1}):
        with pytest.raises(AcsError):
            encode_tensor(wrong)
    with pytest.raises(AcsError, match="2 layers"):
        steering_vector(np.ones((3, 4)), [1, 2])
    right = encode_tensor([[1.0, 2.0]])
    for broken in (
        {"shape": [1, 3]},
        {"shape": [1]},
        {"data": "???"},
        {"original_dtype": "torch.int4"},
        {"shape": None},
    ):
        with pytest.raises(AcsError) as refused:
            decode_tensor({**right, **broken})
        assert refused.value.code == "invalid_answer"


def test_errors_say_status_code_field_and_request(api: Stack) -> None:
    with client_of(api) as client:
        for call, status, code, param in (
            (lambda: client.complete("x", model="none", max_tokens=1), 400, "model_not_found", "model"),
            (lambda: client.complete("x", model="tiny", max_tokens=-1), 400, "invalid_request", "max_tokens"),
            (lambda: client.model("no such model"), 404, "model_not_found", "model"),
            (lambda: client.job("a" * 36), 404, "not_found", None),
            (lambda: client.harvest_job("../models"), 404, "not_found", None),
            (lambda: client.submit_harvest(["x"], model="tiny", layers=[99]), 400, "invalid_request", "layers.0"),
        ):
            with pytest.raises(AcsError) as refused:
                call()
            assert (refused.value.status, refused.value.code, refused.value.param) == (status, code, param)
            assert str(refused.value.request_id).startswith("req_")
        with pytest.raises(AcsError, match="cannot be written as JSON"):
            client.complete("x", model="tiny", temperature=float("nan"))
    with Client(f"{api.base_url}/", "sk-acs-wrong") as stranger, pytest.raises(AcsError) as refused:
        stranger.models()
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_exit_codes_and_what_is_never_shown(api: Stack, tmp_path: Path) -> None:
    acs, stranger = command_of(api), command_of(api)
    object.__setattr__(stranger, "key", "sk-acs-wrong")
    nowhere = command_of(api)
    object.__setattr__(nowhere, "url", "http://127.0.0.1:1")
    assert acs.json("models")[0]["id"] == "tiny"
    assert acs.run("models").stdout.splitlines()[1].split("\t")[0] == "tiny"
    assert acs.json("budget")["remaining"] > 0
    assert "remaining" in acs.run("budget").stdout
    assert stranger.json("models", exit_code=3)["error"]["code"] == "invalid_api_key"
    assert acs.json("jobs", "show", "0" * 36, exit_code=2)["error"]["status"] == 404
    assert acs.run("harvest", tmp_path / "no.jsonl", "-m", "tiny", "-o", tmp_path / "o").returncode == 2
    assert acs.run("complete", "x", "-m", "tiny", "-f", "model=y").returncode == 2
    assert acs.run("complete", "x").returncode == 2
    poor = api.new_user()
    api.django(FEW_TOKENS, pk=poor.id)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("far too long for three tokens\n")
    refused = command_of(api, poor).json("harvest", corpus, "-m", "tiny", "-o", tmp_path / "poor", exit_code=4)
    assert refused["error"]["code"] == "budget_exceeded"
    # By itself the command would be patient for far longer than it is waited for here.
    assert (
        nowhere.run(
            "--base-url", "http://127.0.0.1:1", "harvest", corpus, "-m", "tiny", "-o", tmp_path / "n", "--patience", "0"
        ).returncode
        == 5
    )


def test_the_key_is_in_no_text_of_the_client(api: Stack, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    with client_of(api) as client:
        client.models()
        assert api.user.key not in repr(client) + repr(vars(client)["_server"])
        with pytest.raises(AcsError):
            client.model("none")
    assert caplog.text
    assert api.user.key not in caplog.text


def test_where_the_server_is_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, api: Stack) -> None:
    for name in ("ACS_BASE_URL", "ACS_API_BASE", "ACS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AcsError, match="ACS_BASE_URL"):
        Client()
    monkeypatch.setenv("ACS_API_BASE", f"{api.base_url}/v1")
    with pytest.raises(AcsError, match="ACS_API_KEY"):
        Client()
    for wrong in ("sk-acs-ключ", "sk-acs\n", "a b"):
        with pytest.raises(AcsError, match="characters"):
            Client(api_key=wrong)
    monkeypatch.setenv("ACS_API_KEY", api.user.key)
    with Client() as client:
        assert [model.id for model in client.models()] == ["tiny"]
    with pytest.raises(AcsError, match="http"):
        Client("ftp://somewhere")


def test_jobs_of_the_command(inference_stack: Stack) -> None:
    acs = command_of(inference_stack, inference_stack.new_user())
    submit = ("jobs", "submit", PROMPT, "-m", "tiny", "-n", "6", "-t", "0", "--key", "once")
    job_id = acs.run(*submit).stdout.strip()
    assert acs.run(*submit).stdout.strip() == job_id
    text = acs.run("jobs", "wait", job_id, "--timeout", "200").stdout
    assert text == acs.run("complete", PROMPT, "-m", "tiny", "-n", "6", "-t", "0").stdout
    shown = acs.json("jobs", "show", job_id)
    assert (shown["status"], acs.json("jobs", "list")) == ("succeeded", [shown])
    assert acs.json("jobs", "list", "--harvest") == []
    assert job_id in acs.run("jobs", "list").stdout
    assert acs.json("jobs", "cancel", job_id)["status"] == "succeeded"
    with client_of(inference_stack) as client:
        # More than an engine does before the cancel comes, however late that is on a busy machine.
        long = client.submit_job([PROMPT] * 60, model="tiny", max_tokens=480, ignore_eos=True)
        with pytest.raises(AcsError) as waiting:
            client.wait_for_job(long.id, timeout_s=0)
        assert waiting.value.code == "still_waiting"
        assert client.cancel_job(long.id).status == "cancelled"
    cancelled = command_of(inference_stack).json("jobs", "wait", long.id, exit_code=6)
    assert cancelled["error"]["code"] == "job_cancelled"


def ask_for_a_minute(client: Client) -> None:
    """Ask until it is refused, at once but where a busy broker brings the count late and the request is let pass."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        client.models()


def test_a_retry_after_is_waited_for_and_a_lost_connection_outlived(inference_stack: Stack) -> None:
    user = inference_stack.new_user(requests_per_minute=2)
    with client_of(inference_stack, user, patience_s=0) as client:
        client.models()
        client.models()
        with pytest.raises(AcsError) as refused:
            ask_for_a_minute(client)
    assert refused.value.code == "rate_limited"
    assert 0 < (refused.value.retry_after or 0) <= 60
    with proxy_to(inference_stack.port) as proxy, client_of(inference_stack, port=proxy.port) as client:
        client.models()
        proxy.cut()
        proxy.mend()
        once = client.complete(PROMPT, **GREEDY, idempotency_key="over the proxy")
        assert client.complete(PROMPT, **GREEDY, idempotency_key="over the proxy").id == once.id
        proxy.cut()
        impatient = client.patient(0.2)
        with pytest.raises(AcsError) as lost:
            impatient.models()
        assert (lost.value.code, lost.value.status) == ("connection_failed", None)
