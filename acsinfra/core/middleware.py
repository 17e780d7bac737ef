"""Django middleware, async throughout: a request that waits must cost a coroutine and not a thread."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from inspect import markcoroutinefunction
from typing import Any

import structlog
from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.handlers.exception import convert_exception_to_response
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import resolve
from django.utils.module_loading import import_string

from acsinfra.core.bare_pages import bad_address_page, stalled_page, too_large_page, wrong_method_page
from acsinfra.core.body_limit import BODY_PASSED_LIMIT, BODY_STALLED
from acsinfra.core.errors import ApiError, error_of_status, invalid, not_found
from acsinfra.core.ids import new_request_id
from acsinfra.core.paths import is_api_path, is_page_path, loggable_path
from acsinfra.core.renderers import render_json
from acsinfra.core.traffic import count_request

logger = structlog.get_logger("acsinfra.requests")

type GetResponse = Callable[[HttpRequest], Awaitable[HttpResponseBase]]

CLIENT_CLOSED_REQUEST = 499
CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, Location, X-Acs-Longpoll",
}
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2000}")


class AsyncMiddleware:
    """A middleware whose `__call__` is a coroutine function; Django adapts it for its sync test client."""

    sync_capable = False
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The answer to `request`."""
        return await self.get_response(request)


class RequestIdMiddleware(AsyncMiddleware):
    """Gives each request its id (`request.request_id`, the answer's `X-Request-Id`, every log line) and logs it."""

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The answer, with its id."""
        started = time.perf_counter()
        request_id = request.request_id = new_request_id()  # type: ignore[attr-defined]
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                response = await self.get_response(request)
            except asyncio.CancelledError:
                _note_request(request, request_id, CLIENT_CLOSED_REQUEST, "", started)
                raise
        response["X-Request-Id"] = request_id
        # Django would log 4xx answers once more.
        response._has_been_logged = True  # type: ignore[attr-defined]
        if response.streaming:
            response._resource_closers.append(  # type: ignore[attr-defined]
                lambda: _note_request(request, request_id, response.status_code, error_code_of(response), started)
            )
        else:
            _note_request(request, request_id, response.status_code, error_code_of(response), started)
        return response


def error_code_of(response: HttpResponseBase) -> str:
    """The code of the error that `response` is, or that its stream ended with; empty for none."""
    return getattr(response, "error_code", "")


def _note_request(request: HttpRequest, request_id: str, status: int, code: str, started: float) -> None:
    key = getattr(request, "api_key", None)
    seconds = time.perf_counter() - started
    count_request(request, status=status, code=code, seconds=seconds)
    logger.info(
        "request",
        request_id=request_id,
        method=request.method,
        path=loggable_path(request.path),
        status=status,
        code=code or None,
        ms=round(seconds * 1000, 1),
        user_id=key.user_id if key else None,
        key_prefix=key.prefix if key else None,
    )


class ApiMiddleware(AsyncMiddleware):
    """What every answer below /v1 has: CORS, an answered OPTIONS, JSON errors whatever failed, a Content-Length."""

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The answer; outside /v1 as it comes."""
        if not is_api_path(request.path_info):
            return await self.get_response(request)
        try:
            request.get_host()
        except DisallowedHost:
            response: HttpResponseBase = as_response(invalid("The Host header is not one of this server's."))
        else:
            response = _options(request) if request.method == "OPTIONS" else await self.get_response(request)
        is_json = response.get("Content-Type", "").startswith("application/json")
        if response.status_code >= 400 and not response.streaming and not is_json:
            response = as_response(error_of_status(response.status_code))
        for name, value in CORS_HEADERS.items():
            response[name] = value
        response["X-Content-Type-Options"] = "nosniff"
        response.setdefault("Cache-Control", "no-store")
        if settings.SECURE_HSTS_SECONDS and request.is_secure():
            response["Strict-Transport-Security"] = f"max-age={settings.SECURE_HSTS_SECONDS}"
        if isinstance(response, HttpResponse) and response.status_code != 204:
            response.setdefault("Content-Length", str(len(response.content)))
        return response


def as_response(error: ApiError) -> HttpResponse:
    """`error` as Django's response, outside DRF's views."""
    response = HttpResponse(
        render_json(error.body()), status=error.status, headers=error.headers, content_type="application/json"
    )
    response.error_code = error.code.value  # type: ignore[attr-defined]
    return response


def _options(request: HttpRequest) -> HttpResponse:
    """The preflight, answered without a key, and a plain OPTIONS alike."""
    try:
        view = resolve(request.path_info).func
    except Http404:
        return as_response(not_found())
    view_class = getattr(view, "view_class", None) or getattr(view, "cls", None)
    if view_class is None:
        return as_response(not_found())
    names = [name.upper() for name in view_class.http_method_names if hasattr(view_class, name)]
    allowed = ", ".join([*names, "HEAD"] if "GET" in names and "HEAD" not in names else names)
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {
        "Allow": allowed,
        "Access-Control-Allow-Methods": allowed,
        "Access-Control-Allow-Headers": asked
        if _HEADER_NAMES.fullmatch(asked)
        else "Authorization, Content-Type, Idempotency-Key",
        "Access-Control-Max-Age": "86400",
        "Vary": "Access-Control-Request-Headers",
    }
    response = HttpResponse(status=204, headers=headers)
    del response["Content-Type"]
    return response


class PagesOnlyMiddleware(AsyncMiddleware):
    """Runs settings.PAGES_MIDDLEWARE around the pages and nothing around the API.

    Most of those are synchronous, and would take each API request through threads several times.
    """

    def __init__(self, get_response: GetResponse) -> None:
        super().__init__(get_response)
        self._view_hooks: list[Callable[..., Awaitable[HttpResponseBase | None]]] = []
        self._around_pages = self._build_chain(get_response)

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The answer, through the pages' middleware where it is a page."""
        if not is_page_path(request.path_info):
            return await self.get_response(request)
        response = await self._around_pages(request)
        if isinstance(response, StreamingHttpResponse) and hasattr(request, "scope"):
            chunks = response.streaming_content
            if isinstance(chunks, Iterator):
                # Django would read a static file whole before it sends its first byte.
                response.streaming_content = _read_in_threads(chunks)
        return response

    async def process_view(
        self, request: HttpRequest, view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponseBase | None:
        """Django's hook before a view: CSRF is checked in it."""
        if is_page_path(request.path_info):
            for hook in self._view_hooks:
                if (response := await hook(request, view, args, kwargs)) is not None:
                    return response
        return None

    def _build_chain(self, get_response: GetResponse) -> GetResponse:
        chain: Any = get_response
        for path in reversed(settings.PAGES_MIDDLEWARE):
            factory = import_string(path)
            is_async = getattr(factory, "async_capable", False)
            middleware = factory(chain if is_async else async_to_sync(chain))
            if hasattr(middleware, "process_view"):
                self._view_hooks.insert(0, _as_async(middleware.process_view))
            chain = convert_exception_to_response(middleware if is_async else sync_to_async(middleware))
        return chain  # type: ignore[no-any-return]


class BarePagesMiddleware(AsyncMiddleware):
    """Answers what no view of a page should see, and gives a wrong method's answer a body: browsers show none else."""

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The answer."""
        scope = getattr(request, "scope", {})
        if BODY_PASSED_LIMIT in scope:
            return too_large_page()
        if BODY_STALLED in scope:
            return stalled_page()
        # PostgreSQL takes none in a text, and no page's address has one.
        if "\0" in request.path_info or "%00" in request.META.get("QUERY_STRING", ""):
            return bad_address_page()
        response = await self.get_response(request)
        return wrong_method_page(response["Allow"]) if response.status_code == 405 else response


async def _read_in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk


def _as_async(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    return function if iscoroutinefunction(function) else sync_to_async(function)
