"""Django's ASGI handler, with a way for the API that needs no thread.

Django's own sends its signals and closes its responses in a thread of the request's own, which then idles for as long
as the request waits: 2,000 waiting Completions would be 2,000 threads.
"""

import asyncio
import codecs
from contextlib import closing
from typing import Any
from urllib.parse import quote_from_bytes

import structlog
from django.conf import settings
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.http import HttpRequest
from django.urls import set_script_prefix, set_urlconf
from django.utils.http import parse_header_parameters

from acsinfra.core.paths import is_api_path

logger = structlog.get_logger(__name__)

_ALL_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_UNREADABLE_CONTENT_TYPE = b"application/x-unreadable"


class Handler(ASGIHandler):
    """`ASGIHandler`, whose requests below /v1 run in the event loop from end to end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One connection of ASGI; the API's need no thread of the request's own, nor the context that keeps it."""
        if scope["type"] == "http" and is_api_path(scope["path"]):
            await self.handle(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; a client that goes away cancels the view."""
        make_readable(scope)
        if not is_api_path(scope["path"]):
            await super().handle(scope, receive, send)
            return
        try:
            body_file = await self.read_body(receive)
        except RequestAborted:
            return
        with closing(body_file):
            set_script_prefix(get_script_prefix(scope))
            set_urlconf(settings.ROOT_URLCONF)
            request = self.request_class(scope, body_file)
            try:
                async with asyncio.TaskGroup() as group:
                    listener = group.create_task(self.listen_for_disconnect(receive))
                    await self._answer(request, send)
                    listener.cancel()
            except* RequestAborted:
                pass

    async def _answer(self, request: HttpRequest, send: Any) -> None:
        response: Any = None
        try:
            response = await self._middleware_chain(request)  # type: ignore[attr-defined]
            response._handler_class = type(self)
            await self.send_response(response, send)
        finally:
            request.close()
            if response is not None:
                # Sends request_finished, whose receivers find nothing of this request to close: no ORM runs here.
                response.close()


def make_readable(scope: Any) -> None:
    """Replace what Django's request would stumble over: a query string of raw bytes, an unreadable Content-Type."""
    query: bytes = scope.get("query_string", b"")
    if not query.isascii():
        scope["query_string"] = quote_from_bytes(query, safe=_ALL_ASCII).encode()
    if any(name == b"content-type" and not _is_readable(value) for name, value in scope["headers"]):
        scope["headers"] = [
            (name, _UNREADABLE_CONTENT_TYPE if name == b"content-type" else value) for name, value in scope["headers"]
        ]


def _is_readable(content_type: bytes) -> bool:
    if content_type == b"application/json":
        return True
    try:
        _, parameters = parse_header_parameters(content_type.decode("latin-1"))
        codecs.lookup(parameters.get("charset", "utf-8"))
    except Exception:  # noqa: BLE001 (whatever the codec or the parser of mail headers raises)
        return False
    return True
