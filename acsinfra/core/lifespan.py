"""What an API process opens before it serves and closes when it stops.

An app registers an async context manager from its `AppConfig.ready`; they are entered in that order at ASGI's lifespan
startup and left in reverse at its shutdown.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import structlog
from asgiref.typing import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope

from acsinfra.core.courier import close_shared_courier
from acsinfra.core.db import async_pool, close_async_pool

logger = structlog.get_logger(__name__)

type Opener = Callable[[], AbstractAsyncContextManager[object]]

_openers: list[Opener] = []


def while_serving(opener: Opener) -> Opener:
    """Register `opener`: an API process serves inside the context manager that it makes."""
    if opener not in _openers:
        _openers.append(opener)
    return opener


class Lifespan:
    """ASGI middleware that answers the lifespan protocol, refuses WebSockets and passes HTTP on."""

    def __init__(self, app: ASGI3Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One connection of ASGI."""
        if scope["type"] == "websocket":
            await receive()
            # A server answers 403. Django would raise, and the server answer 500.
            await send({"type": "websocket.close", "code": 1000, "reason": "There are no WebSockets here."})
            return
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        await receive()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close_async_pool)
            stack.push_async_callback(close_shared_courier)
            try:
                # Begins to connect, so that the first requests find connections; a database may come later.
                await async_pool()
                for opener in _openers:
                    await stack.enter_async_context(opener())
            except Exception as error:
                logger.exception("the API cannot start")
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            # What is loaded by now stays: no collection need walk through it again, for tens of milliseconds.
            gc.collect()
            gc.freeze()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
