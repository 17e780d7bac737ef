"""`POST /v1/completions` on the real processes, against vLLM's own answers to the same requests."""

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import zstandard

from acsinfra.quickstart.supervisor import PROJECT
from tests.inference.engine.reference import ReferenceModel
from tests.stack import Stack
from tests.tiny_model import TRAINING_TEXT

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
# 50 prompts: beginnings of the training text, of different lengths.
PROMPTS = [text[: 3 + (7 * number) % len(text)] for number, text in enumerate(TRAINING_TEXT * 4)][:50]
SHAPES: dict[str, dict[str, Any]] = {
    "n with seed": {"prompt": "The capital", "max_tokens": 6, "n": 3, "seed": 11, "temperature": 0.8},
    "batch": {"prompt": ["The capital", "It is 12:45", "In"], "max_tokens": 4, "temperature": 0, "logprobs": 1},
    "ids": {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "echo": True},
    "batch of ids": {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 3, "temperature": 0, "return_token_ids": True},
    "echo": {"prompt": "Naïve café", "max_tokens": 3, "temperature": 0, "echo": True},
    "echo with logprobs": {"prompt": "Rain fell", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2},
    "echo with ids": {"prompt": "Rain fell", "max_tokens": 3, "temperature": 0, "echo": True, "return_token_ids": True},
    "logprobs 0": {"prompt": "Many hands", "max_tokens": 5, "temperature": 0, "logprobs": 0},
    "logprobs 5": {"prompt": "Many hands", "max_tokens": 5, "temperature": 0, "logprobs": 5},
    "prompt_logprobs": {"prompt": "Many hands", "max_tokens": 2, "temperature": 0, "prompt_logprobs": 3},
    "whole vocabulary": {"prompt": "Many", "max_tokens": 1, "temperature": 0, "prompt_logprobs": -1},
    "stop string": {"prompt": "The children", "max_tokens": 40, "temperature": 0, "stop": [" a", " the", "e"]},
    "stop string kept": {
        "prompt": "The children",
        "max_tokens": 40,
        "temperature": 0,
        "stop": [" a", " the", "e"],
        "include_stop_str_in_output": True,
    },
    "penalties": {
        "prompt": "Hot water",
        "max_tokens": 20,
        "temperature": 0,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "bias": {"prompt": "Hot water", "max_tokens": 4, "temperature": 0, "logit_bias": {"40": 100}, "logprobs": 1},
    "allowed ids": {"prompt": "Hot water", "max_tokens": 6, "temperature": 0, "allowed_token_ids": [40, 41, 42]},
    "banned ids": {
        "prompt": "Hot water",
        "max_tokens": 2,
        "temperature": 0,
        "allowed_token_ids": [40, 41],
        "logprobs": 3,
    },
    "nucleus with seed": {"prompt": "He was", "max_tokens": 8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
}
BODIES: dict[str, dict[str, Any]] = {
    **{f"greedy {number}": GREEDY | {"prompt": prompt, "logprobs": 3} for number, prompt in enumerate(PROMPTS)},
    **{name: {"model": "tiny"} | body for name, body in SHAPES.items()},
}


@pytest.fixture(scope="module")
def references(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return vLLM's own answers to BODIES."""
    answers = tmp_path_factory.mktemp("reference") / "answers.json"
    subprocess.run(
        [sys.executable, "-m", "tests.inference.vllm_reference", answers],
        input=json.dumps({"model": str(tiny_model), "bodies": list(BODIES.values())}).encode(),
        cwd=PROJECT,
        check=True,
    )
    return dict(zip(BODIES, json.loads(answers.read_text()), strict=True))


@pytest.fixture(scope="module")
def client(references: dict[str, Any], inference_stack: Stack) -> Iterator[httpx.Client]:
    with inference_stack.client() as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("completions", json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    """Return the chunks of a stream, which ends as it must."""
    with client.stream("POST", "completions", json={"model": "tiny", "stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize("name", BODIES)
def test_answers_are_vllms_own(client: httpx.Client, references: dict[str, Any], name: str) -> None:
    answer, reference = complete(client, **BODIES[name]), references[name]
    assert answer["usage"] == {count: reference["usage"][count] for count in answer["usage"]}
    assert len(answer["choices"]) == len(reference["choices"])
    for ours, theirs in zip(answer["choices"], reference["choices"], strict=True):
        assert ours == {field: theirs[field] for field in ours}
        # Orders count where a client may read them.
        if ours["logprobs"]:
            assert list(map(list, filter(None, ours["logprobs"]["top_logprobs"]))) == list(
                map(list, filter(None, theirs["logprobs"]["top_logprobs"]))
            )
    assert reference.keys() - answer.keys() <= {"metrics", "kv_transfer_params", "ec_transfer_params"}
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"


@pytest.mark.parametrize(
    "name", ["greedy 7", "n with seed", "batch", "ids", "echo with logprobs", "echo with ids", "stop string", "bias"]
)
def test_a_stream_adds_up_to_the_whole_answer(client: httpx.Client, name: str) -> None:
    whole = complete(client, **BODIES[name])
    *chunks, last = stream(client, **BODIES[name], stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert not any("usage" in chunk for chunk in chunks)
    # A worker that is busy sends several tokens of a choice at a time.
    assert len(chunks) >= len(whole["choices"])
    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert (own[-1]["finish_reason"], own[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert all(part["finish_reason"] is None for part in own[:-1])
        if choice["logprobs"]:
            for column in choice["logprobs"]:
                assert [value for part in own for value in part["logprobs"][column]] == choice["logprobs"][column]
        if choice["token_ids"]:
            assert [token_id for part in own for token_id in part["token_ids"]] == choice["token_ids"]


def test_a_stream_comes_piece_by_piece(client: httpx.Client) -> None:
    assert len(stream(client, prompt="The", max_tokens=400, temperature=0, ignore_eos=True)) > 10


def test_a_stream_says_its_usage_only_when_asked(client: httpx.Client) -> None:
    assert all(chunk["choices"] for chunk in stream(client, **GREEDY, prompt="The"))


def test_a_refused_stream_is_a_plain_error(client: httpx.Client) -> None:
    response = client.post("completions", json={**GREEDY, "prompt": "", "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_scoring_a_prompt_generates_nothing(client: httpx.Client, references: dict[str, Any]) -> None:
    scored = complete(client, prompt="Rain fell", max_tokens=0, echo=True, logprobs=2)
    (choice,) = scored["choices"]
    expected = references["echo with logprobs"]["choices"][0]["logprobs"]
    count = len(choice["logprobs"]["tokens"])
    assert choice["logprobs"] == {column: values[:count] for column, values in expected.items()}
    assert (choice["text"], choice["finish_reason"]) == ("Rain fell", "length")
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens"] == count


def test_the_whole_vocabulary_is_there_at_every_position_but_the_first(client: httpx.Client) -> None:
    answer = complete(client, prompt="Many hands", max_tokens=1, prompt_logprobs=-1)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for position in others:
        assert len(position) == 640
        assert sum(np.exp([entry["logprob"] for entry in position.values()])) == pytest.approx(1, abs=1e-4)


def test_a_seed_repeats_and_another_differs(client: httpx.Client) -> None:
    body = {"prompt": "What would you", "max_tokens": 16, "temperature": 1.0, "n": 2}
    first, again, other = (complete(client, **body, seed=seed) for seed in (5, 5, 6))
    assert [choice["text"] for choice in first["choices"]] == [choice["text"] for choice in again["choices"]]
    assert [choice["text"] for choice in first["choices"]] != [choice["text"] for choice in other["choices"]]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]


# The openai client, unchanged


def test_the_openai_client_completes(inference_stack: Stack, references: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{inference_stack.base_url}/v1", api_key=inference_stack.user.key) as client:
        answer = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=12, logprobs=3)
        assert answer.choices[0].text == references["greedy 0"]["choices"][0]["text"]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        assert answer.choices[0].logprobs is not None
        assert answer._request_id is not None
        assert answer._request_id.startswith("req_")


def test_the_openai_client_streams(inference_stack: Stack, references: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{inference_stack.base_url}/v1", api_key=inference_stack.user.key) as client:
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt=PROMPTS[0],
                temperature=0,
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == references["greedy 0"]["choices"][0]["text"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_the_async_openai_client_completes_and_streams(
    inference_stack: Stack, references: dict[str, Any]
) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{inference_stack.base_url}/v1", api_key=inference_stack.user.key
    ) as client:

        async def whole(number: int) -> str:
            answer = await client.completions.create(model="tiny", prompt=PROMPTS[number], temperature=0, max_tokens=12)
            return str(answer.choices[0].text)

        async def streamed(number: int) -> str:
            chunks = await client.completions.create(
                model="tiny", prompt=PROMPTS[number], temperature=0, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        texts = await asyncio.gather(*map(whole, range(4)), *map(streamed, range(4)))
    assert texts == [references[f"greedy {number}"]["choices"][0]["text"] for number in (0, 1, 2, 3) * 2]


def test_the_openai_client_reads_errors(inference_stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{inference_stack.base_url}/v1", api_key=inference_stack.user.key) as client:
        with pytest.raises(openai.BadRequestError) as refusal:
            client.completions.create(model="no-such-model", prompt="x", max_tokens=1)
        assert refusal.value.code == "model_not_found"
        assert refusal.value.param == "model"


# Many at once


async def test_two_hundred_requests_at_once_are_all_answered(
    inference_stack: Stack, references: dict[str, Any]
) -> None:
    limits = httpx.Limits(max_connections=200)
    async with inference_stack.async_client(limits=limits) as client:

        async def ask(number: int) -> Any:
            response = await client.post("completions", json=BODIES[f"greedy {number % 50}"])
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        choices = await asyncio.gather(*map(ask, range(200)))
    for number, choice in enumerate(choices):
        expected = references[f"greedy {number % 50}"]["choices"][0]
        assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("length", 12)
        # In a batch sums are rounded otherwise: the same up to a near tie.
        for at in range(12):
            if choice["logprobs"]["tokens"][at] != expected["logprobs"]["tokens"][at]:
                tied = expected["logprobs"]["top_logprobs"][at]
                assert max(tied.values()) - sorted(tied.values())[-2] < 1e-3
                break
            assert choice["logprobs"]["token_logprobs"][at] == pytest.approx(
                expected["logprobs"]["token_logprobs"][at], abs=1e-3
            )


# Activations and steering


def tensor_of(activations: Any) -> np.ndarray[Any, Any]:
    described = activations["residual_stream"]
    assert described["compression"] == "zstd"
    assert described["original_dtype"] == f"torch.{described['dtype']}"
    data = zstandard.ZstdDecompressor().decompress(base64.b64decode(described["data"]))
    return np.frombuffer(data, described["dtype"]).reshape(described["shape"])


def tensor_object(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "data": base64.b64encode(zstandard.compress(array.tobytes())).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(array.shape),
        "compression": "zstd",
    }


def test_activations_are_the_residual_stream(client: httpx.Client, reference: ReferenceModel) -> None:
    answer = complete(client, **GREEDY, prompt=TRAINING_TEXT[1], output_residual_stream=True, return_token_ids=True)
    plain = complete(client, **GREEDY, prompt=TRAINING_TEXT[1])
    (choice,) = answer["choices"]
    assert text_of(answer) == text_of(plain)
    ids = choice["prompt_token_ids"] + choice["token_ids"][:-1]
    stream_rows = tensor_of(answer["activations"])
    assert stream_rows.shape == (4, len(ids), 64)
    expected = reference.read(ids).stream
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    assert np.max(np.abs(stream_rows - expected) / scale) < 1e-5

    some = complete(client, **GREEDY, prompt=TRAINING_TEXT[1], output_residual_stream=[3, 0])
    rows = tensor_of(some["activations"])
    assert np.max(np.abs(rows - stream_rows[[0, 3]]) / scale[[0, 3]]) < 1e-5


def test_no_activations_unless_asked(client: httpx.Client) -> None:
    assert "activations" not in complete(client, **GREEDY, prompt="The", output_residual_stream=False)


def test_steering_changes_the_answer_and_scale_zero_does_not(client: httpx.Client) -> None:
    vector = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    steering = {"activations": tensor_object(vector), "layer_indices": [1], "scale": 8.0}
    body = GREEDY | {"prompt": "The capital of", "logprobs": 3}
    plain = complete(client, **body)
    steered = complete(client, **body, apply_steering_vectors=[steering])
    unscaled = complete(client, **body, apply_steering_vectors=[steering | {"scale": 0}])
    streamed = stream(client, **body, apply_steering_vectors=[steering])
    assert text_of(steered) != text_of(plain)
    assert unscaled["choices"] == plain["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == text_of(steered)
    # Nothing of the steered run stays behind for the same prompt.
    assert complete(client, **body)["choices"] == plain["choices"]


def test_steering_and_capture_at_one_layer_hold_the_steered_stream(client: httpx.Client) -> None:
    vector = np.random.default_rng(1).normal(size=(1, 64)).astype(np.float32)
    steering = {"activations": tensor_object(vector), "layer_indices": [2], "scale": 2.0}
    body = {"prompt": "The capital of", "max_tokens": 1, "temperature": 0, "output_residual_stream": [1, 2]}
    plain = tensor_of(complete(client, **body)["activations"])
    steered = tensor_of(complete(client, **body, apply_steering_vectors=[steering])["activations"])
    np.testing.assert_allclose(steered[0], plain[0], atol=1e-5)
    np.testing.assert_allclose(steered[1], plain[1] + 2 * vector, atol=1e-4)


def test_a_large_steering_vector_travels_in_pieces(client: httpx.Client) -> None:
    rows = np.random.default_rng(2).normal(size=(4, 480, 64)).astype(np.float32)
    steering = {
        "activations": tensor_object(rows),
        "layer_indices": [0, 1, 2, 3],
        "position_indices": list(range(480)),
        "scale": 1.0,
    }
    ids = [5 + number % 600 for number in range(480)]
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "output_residual_stream": [0]}
    plain = tensor_of(complete(client, **body)["activations"])
    steered = tensor_of(complete(client, **body, apply_steering_vectors=[steering])["activations"])
    np.testing.assert_allclose(steered[0, :480], plain[0, :480] + rows[0], atol=1e-4)
