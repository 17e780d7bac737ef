"""Bounds request bodies, and the wait for them, before Django reads them into memory or a temporary file."""

import asyncio
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
# In the scope of a request whose body stopped coming: the seconds that were waited for its next piece.
BODY_STALLED = "acsinfra.body_stalled"
STALL_SECONDS = 60.0


class BodyLimit:
    """ASGI middleware: never hands on more than `limit_of(scope)` bytes of a body.

    Past the limit, by `Content-Length` or while reading, the application sees an ended body and the mark in its
    scope; what the client still sends is thrown away as it comes, so that it can finish sending and read the answer.
    So it does where no piece of a body that has not ended comes for `stall_seconds`.
    """

    def __init__(
        self, app: ASGI3Application, *, limit_of: Callable[[HTTPScope], int], stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.app = app
        self.limit_of = limit_of
        self.stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One connection of ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limit_of(scope)
        await self.app(scope, _BoundedBody(scope, receive, limit, self.stall_seconds).receive, send)


class _BoundedBody:
    def __init__(self, scope: Any, receive: ASGIReceiveCallable, limit: int, stall_seconds: float) -> None:
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._has_come = False
        self._is_cut = False
        self._taken = 0
        self._declared = _content_length(scope)

    async def receive(self) -> ASGIReceiveEvent:
        """The next event, the body's bounded."""
        if self._is_cut:
            # Django takes anything but a disconnect after the body's end for a broken server.
            while (event := await self._receive())["type"] != "http.disconnect":
                pass
            return event
        if self._declared > self._limit:
            return self._cut(BODY_PASSED_LIMIT, self._limit)
        try:
            # After its end only the client's leaving is waited for.
            async with asyncio.timeout(None if self._has_come else self._stall_seconds):
                event = await self._receive()
        except TimeoutError:
            return self._cut(BODY_STALLED, self._stall_seconds)
        if event["type"] == "http.request":
            self._has_come = not event["more_body"]
            self._taken += len(event["body"])
            if self._taken > self._limit:
                return self._cut(BODY_PASSED_LIMIT, self._limit)
        return event

    def _cut(self, mark: str, value: float) -> ASGIReceiveEvent:
        self._is_cut = True
        self._scope[mark] = value
        return {"type": "http.request", "body": b"", "more_body": False}


def _content_length(scope: Mapping[str, Any]) -> int:
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(declared) if declared.isdigit() and len(declared) < 20 else 0
