"""GET /v1/models and GET /v1/models/{id} of a running API."""

import time

import httpx
import openai
import pytest

from tests.stack import Stack

CAPABILITIES = {
    "max_model_len": 512,
    "n_layers": 4,
    "hidden_size": 64,
    "max_logprobs": 100,
    "activations": True,
    "steering": True,
    "harvest": True,
    "max_activation_prompt_tokens": 512,
    "full_vocab_max_prompt_tokens": 512,
}

SWITCH = """
from inference.models import BaseModel
from inference.services import set_enabled
set_enabled(model=BaseModel.objects.get(name="off"), enabled=enabled)
result = None
"""


def test_the_list_and_one_model(api: Stack) -> None:
    with api.client() as client:
        answer = client.get("models")
        assert answer.status_code == 200
        assert set(answer.json()) == {"object", "data"}
        assert answer.json()["object"] == "list"
        model = next(model for model in answer.json()["data"] if model["id"] == "tiny")
        assert client.get("models/tiny").json() == model
    assert abs(model.pop("created") - time.time()) < 3600
    assert model.pop("owned_by")
    assert model.pop("status") in ("live", "starting", "unavailable")
    assert model == {"id": "tiny", "object": "model", "served_model_name": "tiny", "capabilities": CAPABILITIES}


def test_the_openai_client_reads_them(api: Stack) -> None:
    with openai.OpenAI(api_key=api.user.key, base_url=f"{api.base_url}/v1", max_retries=0) as client:
        assert "tiny" in [model.id for model in client.models.list()]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["nobody", "tiny ", "TINY", "%00", "a" * 300, "%F0%9F%98%80"])
def test_an_unknown_model_is_a_404(api: Stack, name: str) -> None:
    with api.client() as client:
        answer = client.get(f"models/{name}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("model_not_found", "invalid_request_error", "model")


@pytest.mark.parametrize("path", ["models/", "models/tiny/", "models/a/b", "models/a%2Fb"])
def test_a_path_that_is_no_route_is_a_404(api: Stack, path: str) -> None:
    with api.client() as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "model_not_found")


def test_a_key_is_needed_and_other_methods_are_not_allowed(api: Stack) -> None:
    for path in ("models", "models/tiny"):
        answer = httpx.get(f"{api.base_url}/v1/{path}")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        with api.client() as client:
            assert client.post(path, json={}).status_code == 405
            assert client.delete(path).json()["error"]["code"] == "method_not_allowed"


def test_a_model_that_was_switched_off_is_absent_within_a_second_or_so(api: Stack) -> None:
    code = """
from inference.models import BaseModel
from inference.services import add_model
tiny = BaseModel.objects.get(name="tiny")
add_model(name="off", source=tiny.source, max_model_len=100, has_harvest=False)
result = None
"""
    api.django(code)

    def ids(client: httpx.Client) -> list[str]:
        return [model["id"] for model in client.get("models").json()["data"]]

    def until(present: bool) -> None:
        began = time.monotonic()
        while ("off" in ids(client)) is not present:
            assert time.monotonic() - began < 30
            time.sleep(0.05)

    with api.client() as client:
        until(present=True)
        capabilities = client.get("models/off").json()["capabilities"]
        assert (capabilities["max_model_len"], capabilities["harvest"]) == (100, False)
        api.django(SWITCH, enabled=False)
        until(present=False)
        assert client.get("models/off").status_code == 404
        api.django(SWITCH, enabled=True)
        until(present=True)
        api.django("from inference.models import BaseModel; result = BaseModel.objects.filter(name='off').delete()[0]")
        until(present=False)
