"""Bounds request bodies before Django reads them into memory or a temporary file."""

from collections.abc import Callable, Mapping
from typing import Any

from asgiref.typing import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    HTTPScope,
    Scope,
)

# In the scope of a request whose body passed its limit: the limit, in bytes. The view checks the key, then answers 413.
BODY_PASSED_LIMIT = "acsinfra.body_passed_limit"


class BodyLimit:
    """ASGI middleware: never hands on more than `limit_of(scope)` bytes of a body.

    Past the limit, by `Content-Length` or while reading, the application sees an ended body and the mark in its
    scope; what the client still sends is thrown away as it comes, so that it can finish sending and read the answer.
    """

    def __init__(self, app: ASGI3Application, *, limit_of: Callable[[HTTPScope], int]) -> None:
        self.app = app
        self.limit_of = limit_of

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One connection of ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limit_of(scope)
        await self.app(scope, _BoundedBody(scope, receive, limit).receive, send)


class _BoundedBody:
    def __init__(self, scope: Any, receive: ASGIReceiveCallable, limit: int) -> None:
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._has_passed = False
        self._taken = 0
        self._declared = _content_length(scope)

    async def receive(self) -> ASGIReceiveEvent:
        """The next event, the body's bounded."""
        if self._has_passed:
            # Django takes anything but a disconnect after the body's end for a broken server.
            while (event := await self._receive())["type"] != "http.disconnect":
                pass
            return event
        if self._declared > self._limit:
            return self._pass_limit()
        event = await self._receive()
        if event["type"] == "http.request":
            self._taken += len(event["body"])
            if self._taken > self._limit:
                return self._pass_limit()
        return event

    def _pass_limit(self) -> ASGIReceiveEvent:
        self._has_passed = True
        self._scope[BODY_PASSED_LIMIT] = self._limit
        return {"type": "http.request", "body": b"", "more_body": False}


def _content_length(scope: Mapping[str, Any]) -> int:
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(declared) if declared.isdigit() and len(declared) < 20 else 0
