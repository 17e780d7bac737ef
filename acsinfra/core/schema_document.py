"""What the OpenAPI document says besides DRF's views: who we are, tags, and the service's own routes."""

from collections import defaultdict
from typing import Any, Final

from django.conf import settings

from acsinfra.core.errors import STATUS_OF_CODE, ErrorCode, service_unavailable
from acsinfra.core.schema_errors import error_example

ABOUT: Final = """\
Completions, residual streams, steering vectors and bulk harvests of base language models.

- **Key.** Send `Authorization: Bearer sk-acs-…`. The order of the checks: key, rate, size, JSON, replay of an
  Idempotency-Key, fields, model, Spend limit, capacity, Budget.
- **Strict.** An unknown field, a wrong type (a bool is no number, `1.0` no integer), a value out of range or a key that
  stands twice is a 400 that names the field in `param`. `null` in an optional field is the same as leaving it out.
  A body is at most 10 MiB, of `POST /v1/harvest` 50 MiB.
- **Errors** are `{"error": {"message", "type", "code", "param"}}`, whatever the status. Branch on `code`.
- **Retries.** `Retry-After` says when one can help; `x-should-retry: false` that it cannot.
- **Ids** of jobs are UUIDv7; times are ISO 8601 in UTC with milliseconds. Another User's id is a 404, as one that never
  existed.
- **CORS.** Any origin may call, without credentials.

The [guides](/docs/guide) show all of it at work and say [what to do about each error](/docs/guide/errors);
[llms.txt](/llms.txt) has them on one page.

"""
TAGS: Final = {
    "Completions": "OpenAI's Completions with vLLM's extras, the residual stream and steering vectors.",
    "Models": "The Base models.",
    "Jobs": "A Job is one Completion request run on the server.",
    "Harvest": "The residual stream of a whole corpus, as files.",
    "Budget": "A User's tokens for a calendar month, UTC.",
    "Service": "Whether the service is there. These routes need no key.",
}
STREAM: Final = """\
One frame a token or more: `data: ` and a CompletionChunk as JSON, then an empty line; the last is `data: [DONE]`. An
error after the first byte is a frame with the error object, after which the stream ends without `[DONE]`."""
OK: Final = {"type": "string", "const": "ok"}
STATE: Final = {"type": "string", "enum": ["ok", "unavailable"]}
PARTS: Final = ("database", "broker", "storage")


def complete_document(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """drf-spectacular's hook at the end of its work."""
    result["info"]["description"] = ABOUT + _table_of_codes()
    result["info"]["license"] = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
    result["servers"] = [{"url": settings.PUBLIC_URL or "/"}]
    result["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    result["paths"] |= _service_paths()
    _describe_stream(result)
    for path in result["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                operation["requestBody"]["required"] = True
    return _tidied(result)  # type: ignore[no-any-return]


def _table_of_codes() -> str:
    codes: defaultdict[int, list[str]] = defaultdict(list)
    for code in ErrorCode:
        codes[STATUS_OF_CODE.get(code, 400)].append(f"`{code.value}`")
    codes[404].append(f"`{ErrorCode.MODEL_NOT_FOUND.value}` (`GET /v1/models/{{model_id}}`)")
    rows = [f"| {status} | {', '.join(named)} |\n" for status, named in sorted(codes.items())]
    return "| status | codes |\n| --- | --- |\n" + "".join(rows)


def _describe_stream(result: dict[str, Any]) -> None:
    """Name the schema of a stream's frames, which OpenAPI 3.1 has no keyword for."""
    for path in result["paths"].values():
        for operation in path.values():
            stream = operation["responses"].get("200", {}).get("content", {}).get("text/event-stream")
            if stream is not None:
                stream["x-event-schema"] = stream["schema"]
                stream["schema"] = {"description": STREAM}


def _tidied(value: Any) -> Any:
    """`value` without drf-spectacular's marks of enums, which stay where they stand, and examples by their names."""
    if isinstance(value, list):
        return [_tidied(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidied = {key: _tidied(item) for key, item in value.items() if key != "x-spec-enum-id"}
    if isinstance(tidied.get("content"), dict):
        for media_type in tidied["content"].values():
            if "examples" in media_type:
                named = media_type["examples"].items()
                media_type["examples"] = {example.pop("summary", key): example for key, example in named}
    return tidied


def _service_paths() -> dict[str, Any]:
    parts = dict.fromkeys(PARTS, STATE)
    away = service_unavailable().body()
    document = {"openapi": "3.1.0", "info": {"title": "ACS Infra", "version": "1"}, "paths": {}}
    return {
        "/openapi.json": _get(
            "get_openapi",
            "Get this document",
            "As JSON, for any origin.",
            {"200": _json("OpenAPI 3.1.", {"type": "object"}, document)},
        ),
        "/metrics": _get(
            "get_metrics",
            "Get metrics for Prometheus",
            "Of all API processes. From this host, or with the bearer token that the setting METRICS_TOKEN names.",
            {
                "200": {
                    "description": "Prometheus' text, or OpenMetrics where `Accept` asks for it.",
                    "content": {
                        media_type: {"schema": {"type": "string"}}
                        for media_type in ("text/plain", "application/openmetrics-text")
                    },
                },
                "401": _error(ErrorCode.INVALID_API_KEY, {"WWW-Authenticate": {"schema": {"type": "string"}}}),
                "503": _error(ErrorCode.SERVICE_UNAVAILABLE, {"Retry-After": {"schema": {"type": "integer"}}}),
            },
        ),
        "/healthz": _get(
            "get_health",
            "Is this process up?",
            "It answers while the process runs, whatever else is away.",
            {"200": _json("It is.", _object(status=OK), {"status": "ok"})},
        ),
        "/readyz": _get(
            "get_readiness",
            "Is the service ready?",
            "Whether the database, the broker and the storage answer.",
            {
                "200": _json(
                    "All do.",
                    _object(status=OK, **dict.fromkeys(PARTS, OK)),
                    {"status": "ok"} | dict.fromkeys(PARTS, "ok"),
                ),
                "503": _json(
                    "`service_unavailable`: one does not.",
                    {"allOf": [{"$ref": "#/components/schemas/Error"}, _object(**parts)]},
                    away | dict.fromkeys(PARTS, "ok") | {"broker": "unavailable"},
                ),
            },
        ),
    }


def _get(operation_id: str, summary: str, description: str, responses: dict[str, Any]) -> dict[str, Any]:
    operation = {
        "operationId": operation_id,
        "summary": summary,
        "description": description,
        "tags": ["Service"],
        "security": [{}],
        "responses": responses,
    }
    return {"get": operation}


def _json(description: str, schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema, "example": example}}}


def _error(code: ErrorCode, headers: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return _json(f"`{code.value}`", schema, error_example(code).body()) | {"headers": headers}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}
