"""Routes that belong to no app: health, the OpenAPI document, and what is said about the rest."""

import asyncio
import functools
import threading
from collections.abc import Awaitable

import redis.asyncio
import structlog
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.types import OpenApiTypes
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from acsinfra.core.db import fetch_one
from acsinfra.core.errors import ApiError, ErrorCode, not_found, service_unavailable
from acsinfra.core.middleware import as_response
from acsinfra.core.renderers import render_json
from acsinfra.core.schema import documented
from acsinfra.core.storage import get_storage

logger = structlog.get_logger(__name__)

PART_SECONDS = 4.0
_making_the_document = threading.Lock()


@require_safe
async def healthz(request: HttpRequest) -> HttpResponse:
    """Whether this process is up."""
    return HttpResponse(render_json({"status": "ok"}), content_type="application/json")


@require_safe
async def readyz(request: HttpRequest) -> HttpResponse:
    """Whether the database, the broker and the storage answer: 200, or 503 and which of them does not."""
    checks = {"database": fetch_one("SELECT 1"), "broker": _ping_broker(), "storage": _check_storage()}
    states = await asyncio.gather(*(_state(name, check) for name, check in checks.items()))
    parts = dict(zip(checks, states, strict=True))
    if set(states) == {"ok"}:
        return HttpResponse(render_json({"status": "ok", **parts}), content_type="application/json")
    away = service_unavailable()
    away.extra = parts
    return as_response(away)


async def _state(name: str, check: Awaitable[object]) -> str:
    try:
        async with asyncio.timeout(PART_SECONDS):
            await check
    except Exception as error:  # noqa: BLE001 (each client has its own; all mean the same here)
        logger.warning("not ready", part=name, error_type=type(error).__name__)
        return "unavailable"
    return "ok"


async def _ping_broker() -> None:
    async with redis.asyncio.Redis.from_url(settings.BROKER_URL, socket_connect_timeout=PART_SECONDS) as client:
        await client.ping()


async def _check_storage() -> None:
    await asyncio.to_thread(get_storage().check)


def openapi_document() -> bytes:
    """The OpenAPI document as JSON; it changes with the code alone."""
    # drf-spectacular 0.30 loads its extensions at first use, and two threads that do so at once break each other.
    with _making_the_document:
        return _make_document()


@functools.cache
def _make_document() -> bytes:
    generator = SchemaGenerator()  # type: ignore[no-untyped-call]
    return render_json(generator.get_schema(request=None, public=True))  # type: ignore[no-untyped-call]


@require_safe
async def openapi(request: HttpRequest) -> HttpResponse:
    """`GET /openapi.json`, for anyone."""
    body = await asyncio.to_thread(openapi_document)
    return HttpResponse(body, content_type="application/json", headers={"Access-Control-Allow-Origin": "*"})


async def unknown_route(request: HttpRequest) -> HttpResponse:
    """What no route below /v1 matches, malformed ids too."""
    return as_response(not_found())


class ChatCompletionsView(ApiView):
    """Base models do not chat."""

    @documented(
        operation_id="create_chat_completion",
        tag="Completions",
        request=OpenApiTypes.OBJECT,
        responses={},
        errors=[ErrorCode.CHAT_COMPLETIONS_UNSUPPORTED],
        examples={"chat": {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}},
    )
    async def post(self, request: Request) -> Response:
        """Refuse a chat.

        Base models do not chat: `400 chat_completions_unsupported`, whatever the body.
        """
        raise ApiError(
            ErrorCode.CHAT_COMPLETIONS_UNSUPPORTED,
            "These are Base models: they complete text and have no chat format. Use POST /v1/completions.",
        )
