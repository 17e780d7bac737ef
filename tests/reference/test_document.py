"""The OpenAPI document: valid, whole, and the same as the contract of the API."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import jsonschema
import pytest
from django.core.management import call_command
from django.urls import URLPattern, URLResolver, get_resolver
from openapi_spec_validator import OpenAPIV31SpecValidator

from acsinfra.core.errors import STATUS_OF_CODE, ErrorCode, error_type
from acsinfra.core.views import openapi_document

# name: (least, greatest, default); None where there is none.
COMPLETION_BOUNDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "max_tokens": (0, 32_000, None),
    "n": (1, 16, 1),
    "temperature": (0, 100, 1.0),
    "top_p": (None, 1, 1.0),
    "top_k": (-1, 2**63 - 1, -1),
    "min_p": (0, 1, 0),
    "presence_penalty": (-2, 2, 0),
    "frequency_penalty": (-2, 2, 0),
    "repetition_penalty": (None, 2, 1.0),
    "seed": (0, 2**63 - 1, None),
    "logprobs": (0, 100, None),
    "prompt_logprobs": (-1, 100, None),
    "min_tokens": (0, 32_000, 0),
}
COMPLETION_SIZES: Final = {
    "user": ("maxLength", 256),
    "logit_bias": ("maxProperties", 300),
    "stop_token_ids": ("maxItems", 16),
    "allowed_token_ids": ("maxItems", 1024),
    "logprob_token_ids": ("maxItems", 128),
    "apply_steering_vectors": ("maxItems", 8),
}
COMPLETION_SWITCHES: Final = {
    "echo": False,
    "stream": False,
    "add_special_tokens": True,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "return_token_ids": False,
}
OTHER_FIELDS: Final = {"model", "prompt", "best_of", "stop", "stream_options", "output_residual_stream"}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document as `/openapi.json` serves it."""
    loaded: dict[str, Any] = json.loads(openapi_document())
    return loaded


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each path, method and operation."""
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def examples() -> Iterator[Any]:
    """Yield the schema and the value of each example of a JSON body."""
    for path, method, operation in operations():
        bodies = [("request", operation["requestBody"])] if "requestBody" in operation else []
        bodies += operation["responses"].items()
        for where, body in bodies:
            for media_type, content in body.get("content", {}).items():
                if path == "/metrics" and where == "200":
                    continue
                named = content.get("examples", {"example": {"value": content.get("example")}})
                assert named, (path, method, where)
                for name, example in named.items():
                    case = (content["schema"], example["value"])
                    yield pytest.param(*case, id=f"{method} {path} {where} {media_type} {name}")


def test_the_document_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("spectacular", "--validate", "--fail-on-warn")
    assert "openapi: 3.1.0" in capsys.readouterr().out
    OpenAPIV31SpecValidator(document()).validate()


def test_every_route_of_the_api_is_in_it_with_its_id() -> None:
    def routes(resolver: URLResolver, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
        for entry in resolver.url_patterns:
            path = prefix + str(entry.pattern)
            if isinstance(entry, URLResolver):
                yield from routes(entry, path)
            elif isinstance(entry, URLPattern) and path.startswith("v1/"):
                view: Any = getattr(entry.callback, "cls", None)
                methods = [name for name in ("get", "post", "put", "patch", "delete") if hasattr(view, name)]
                yield "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path), methods

    found = {path: sorted(methods) for path, methods in routes(get_resolver())}
    described = {path: sorted(methods) for path, methods in document()["paths"].items() if path.startswith("/v1/")}
    assert described == found
    assert "/v1/completion-jobs/{job_id}/result" in described
    assert "/v1/harvest/{job_id}/cancel" in described
    assert {"/healthz", "/readyz", "/metrics", "/openapi.json"} < set(document()["paths"])


def test_every_operation_says_what_it_is_and_what_may_go_wrong() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids)
    for path, _, operation in operations():
        assert operation["summary"], path
        assert operation["description"], path
        if not path.startswith("/v1/"):
            continue
        assert operation["security"] == [{"bearer": []}], path
        assert {"400", "401", "429", "500", "503"} <= set(operation["responses"]), path
        for response in operation["responses"].values():
            assert response["description"], path
            assert response["headers"]["X-Request-Id"]["required"] is True, path


def test_every_error_code_is_in_it_with_its_status_type_and_headers() -> None:
    seen: set[str] = set()
    for path, _, operation in operations():
        for status, response in operation["responses"].items():
            if int(status) < 400:
                continue
            for example in response["content"]["application/json"].get("examples", {}).values():
                error = example["value"]["error"]
                seen.add(error["code"])
                assert error["type"] == error_type(int(status)), path
                usual = STATUS_OF_CODE.get(ErrorCode(error["code"]), 400)
                assert usual == int(status) or (error["code"], status) == ("model_not_found", "404"), path
                assert f"`{error['code']}`" in response["description"], path
    # A method that a route lacks is no operation of it.
    assert seen == {code.value for code in ErrorCode} - {"method_not_allowed"}
    assert all(f"`{code.value}`" in document()["info"]["description"] for code in ErrorCode)
    completions = document()["paths"]["/v1/completions"]["post"]["responses"]
    assert {"Retry-After", "x-should-retry"} <= set(completions["429"]["headers"])
    assert "WWW-Authenticate" in completions["401"]["headers"]
    result = document()["paths"]["/v1/completion-jobs/{job_id}/result"]["get"]["responses"]
    assert set(result) >= {"200", "202", "400", "404", "409", "410", "429", "500", "502", "504"}
    assert "Retry-After" in result["202"]["headers"]


def test_the_headers_of_the_contract_are_in_it() -> None:
    paths = document()["paths"]
    for path, is_required in (("/v1/completions", False), ("/v1/completion-jobs", True), ("/v1/harvest", False)):
        parameters = {one["name"]: one for one in paths[path]["post"]["parameters"]}
        assert parameters["Idempotency-Key"].get("required", False) is is_required
        assert parameters["Idempotency-Key"]["schema"]["maxLength"] == 255
    for path in ("/v1/completion-jobs", "/v1/harvest"):
        assert "Location" in paths[path]["post"]["responses"]["202"]["headers"]
    assert {"X-Acs-Longpoll", "Retry-After"} <= set(paths["/v1/harvest/{job_id}"]["get"]["responses"]["200"]["headers"])
    assert document()["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_the_fields_of_a_completion_have_the_bounds_and_defaults_of_the_contract() -> None:
    schema = document()["components"]["schemas"]["CompletionRequest"]
    fields = schema["properties"]
    assert set(fields) == set(COMPLETION_BOUNDS) | set(COMPLETION_SIZES) | set(COMPLETION_SWITCHES) | OTHER_FIELDS
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "prompt"]
    for name, (least, greatest, default) in COMPLETION_BOUNDS.items():
        field = fields[name]
        assert (field.get("minimum"), field.get("maximum"), field.get("default")) == (least, greatest, default), name
    assert fields["top_p"]["exclusiveMinimum"] == fields["repetition_penalty"]["exclusiveMinimum"] == 0
    for name, (keyword, size) in COMPLETION_SIZES.items():
        assert fields[name][keyword] == size, name
    for name, value in COMPLETION_SWITCHES.items():
        assert (fields[name]["type"], fields[name]["default"]) == (["boolean", "null"], value), name
    assert all(field.get("description") for field in fields.values())


def test_the_fields_of_a_harvest_have_the_bounds_and_defaults_of_the_contract() -> None:
    fields = document()["components"]["schemas"]["HarvestRequest"]["properties"]
    assert (fields["prompts"]["minItems"], fields["prompts"]["maxItems"]) == (1, 4096)
    assert fields["prompts"]["items"]["minLength"] == 1
    assert [fields["shard_size"][name] for name in ("minimum", "maximum", "default")] == [1, 4096, 32]
    assert [fields["batch_size"][name] for name in ("minimum", "maximum")] == [1, 64]
    assert fields["add_special_tokens"]["default"] is True
    wait = document()["paths"]["/v1/harvest/{job_id}"]["get"]["parameters"]
    schema = next(parameter["schema"] for parameter in wait if parameter["name"] == "wait")
    assert [schema[name] for name in ("minimum", "maximum", "default")] == [0, 60, 0]


@pytest.mark.parametrize(("schema", "value"), list(examples()))
def test_each_example_fits_its_schema(schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document()["components"]}
    jsonschema.Draft202012Validator(whole, format_checker=jsonschema.FormatChecker()).validate(value)
