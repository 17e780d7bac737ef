"""The examples of the reference, sent to the real API: statuses, shapes, headers and errors are as it says."""

import ast
import base64
import copy
import json
import math
import re
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
import pytest

from acsinfra.core.errors import ErrorCode
from acsinfra.core.schema_errors import error_example
from acsinfra.core.views import openapi_document
from tests.reference.provocations import ELSEWHERE, SPARE, provoke
from tests.stack import Stack

HIDDEN: Final = 64


@cache
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(openapi_document())
    return loaded


def _posts() -> Iterator[Any]:
    for path, methods in document()["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        for name, example in (body or {}).get("content", {}).get("application/json", {}).get("examples", {}).items():
            yield pytest.param(path, name, example["value"], id=f"{path} {name}")


def _for_tiny(value: Any) -> Any:
    """Return `value` with the model that runs here, and ones of its hidden size in the place of tensors."""
    if isinstance(value, dict) and "dtype" in value:
        shape = [*value["shape"][:-1], HIDDEN]
        data = base64.b64encode(b"\0\0\x80?" * math.prod(shape)).decode()
        return {**value, "shape": shape, "data": data, "compression": "none"}
    if isinstance(value, dict):
        return {key: "tiny" if key == "model" else _for_tiny(item) for key, item in value.items()}
    return [_for_tiny(item) for item in value] if isinstance(value, list) else value


def _check(answer: httpx.Response, path: str, method: str) -> None:
    """Assert that the document describes the answer: its status, its headers, its body."""
    described = document()["paths"][path][method]["responses"]
    assert str(answer.status_code) in described, answer.text
    response = described[str(answer.status_code)]
    for name, header in response["headers"].items():
        assert name in answer.headers or not header.get("required"), name
    media_type = answer.headers["content-type"].split(";")[0]
    content = response["content"][media_type]
    if media_type == "application/json":
        validate(answer.json(), content["schema"])
        return
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    for frame in frames[:-1]:
        validate(json.loads(frame), content["x-event-schema"])


def validate(value: Any, schema: dict[str, Any]) -> None:
    """Assert that `value` fits, and has no key that the document does not name."""
    closed = copy.deepcopy({**schema, "components": document()["components"]})
    for component in closed["components"]["schemas"].values():
        if component.get("type") == "object" and "properties" in component:
            component["additionalProperties"] = False
    jsonschema.Draft202012Validator(closed, format_checker=jsonschema.FormatChecker()).validate(value)


@pytest.mark.parametrize(("path", "name", "body"), list(_posts()))
def test_each_example_of_a_request_is_answered_as_described(
    inference_stack: Stack, harvest_stack: Stack, path: str, name: str, body: dict[str, Any]
) -> None:
    headers = {"Idempotency-Key": uuid.uuid4().hex} if not body.get("stream") else {}
    with inference_stack.client() as client:
        answer = client.post(path.removeprefix("/v1/"), json=_for_tiny(body), headers=headers)
        _check(answer, path, "post")
        expected = {"/v1/completions": 200, "/v1/chat/completions": 400}
        assert answer.status_code == expected.get(path, 202), answer.text
        if answer.status_code != 202:
            return
        job = answer.headers["Location"].removeprefix("/v1/")
        for method, where, then in (
            ("get", "", ""),
            ("post", "/cancel", "/cancel"),
            *([("get", "/result", "/result")] if "completion-jobs" in path else [("delete", "", "")]),
        ):
            _check(client.request(method, job + then), f"{path}/{{job_id}}{where}", method)


def test_each_route_that_only_reads_answers_as_described(api: Stack) -> None:
    with api.client() as client:
        for path in ("/v1/models", "/v1/budget", "/v1/completion-jobs", "/v1/harvest"):
            _check(client.get(path.removeprefix("/v1/")), path, "get")
        _check(client.get("models/tiny"), "/v1/models/{model_id}", "get")
    for path in ("/healthz", "/readyz", "/openapi.json"):
        # The document is made when it is first asked for.
        answer = httpx.get(f"{api.base_url}{path}", timeout=120)
        content = document()["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        validate(answer.json(), content["schema"])


_MODELS: Final = re.compile(rf"\b({SPARE}|tiny)\b")
_NUMBERS: Final = re.compile(r"\d[\d,:.+T-]*")


def _wording(message: str) -> str:
    """Return the message without its numbers and plurals."""
    return _NUMBERS.sub("0", message).replace("jobs", "job")


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in ELSEWHERE])
def test_each_example_of_an_error_is_what_the_api_answers(
    inference_stack: Stack, harvest_stack: Stack, code: ErrorCode
) -> None:
    example = error_example(code)
    answer = provoke(inference_stack, code)
    assert answer.status_code == example.status, answer.text
    error, described = answer.json()["error"], example.body()["error"]
    assert isinstance(described, dict)
    assert {name: error[name] for name in ("type", "code", "param")} == {
        name: described[name] for name in ("type", "code", "param")
    }
    # A pause by hand has no end, the example has one.
    if code is not ErrorCode.SPEND_CAP:
        assert set(example.headers) <= set(answer.headers) or set(map(str.lower, example.headers)) <= set(
            answer.headers
        )
        assert _wording(_MODELS.sub("smollm2-135m", error["message"])) == _wording(described["message"])


@pytest.mark.parametrize("code", ELSEWHERE)
def test_each_other_code_is_provoked_by_the_test_that_is_named(code: ErrorCode) -> None:
    file, _, name = ELSEWHERE[code].partition("::")
    source = (Path(__file__).parents[2] / file).read_text()
    [test] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    words = [ast.get_source_segment(source, node) or "" for node in (*test.decorator_list, test)]
    assert any(f'"{code.value}"' in part for part in words)
