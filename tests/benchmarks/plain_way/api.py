"""The API's end: `uvicorn tests.benchmarks.plain_way.api:application`.

It takes `{"prompt": [token ids], "max_tokens": n}` and answers `{"id", "token_ids"}`. The environment has BROKER_URL,
and DATABASE_URL, where `make_tables` was called.
"""

import asyncio
import json
import os
import uuid
from typing import Any

from celery import Celery
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.urls import path
from psycopg_pool import AsyncConnectionPool
from redis.asyncio import Redis

from tests.benchmarks.plain_way.names import ANSWERS, QUEUE, TASK

HOLD = """
WITH budget AS (
    UPDATE plain_way.budget SET held = held + %(tokens)s WHERE id = 1 AND used + held + %(tokens)s <= ceiling
    RETURNING id)
INSERT INTO plain_way.hold (id, budget_id, tokens) SELECT %(id)s, id, %(tokens)s FROM budget RETURNING id
"""
SETTLE = """
WITH hold AS (
    UPDATE plain_way.hold SET ended_at = now() WHERE id = %(id)s AND ended_at IS NULL RETURNING budget_id, tokens),
budget AS (
    UPDATE plain_way.budget SET held = held - hold.tokens, used = used + hold.tokens FROM hold
    WHERE budget.id = hold.budget_id RETURNING hold.tokens)
INSERT INTO plain_way.entry (hold_id, tokens) SELECT %(id)s, tokens FROM budget RETURNING id
"""


class Way:
    """What one process has open; made in its event loop, before it serves."""

    def __init__(self) -> None:
        self._pool = AsyncConnectionPool(
            os.environ["DATABASE_URL"], min_size=2, max_size=8, open=False, kwargs={"autocommit": True}
        )
        self._celery = Celery("plain_way", broker=os.environ["BROKER_URL"])
        self._redis = Redis.from_url(os.environ["BROKER_URL"], socket_timeout=None)
        self._waiting: dict[str, asyncio.Future[list[int]]] = {}

    async def open(self) -> None:
        """Connect, and read answers from now on."""
        await self._pool.open()
        self._reader = asyncio.create_task(self._read())

    async def complete(self, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
        """Return the id and the tokens."""
        work = {"id": uuid.uuid4(), "tokens": len(prompt) + max_tokens}
        await self._run(HOLD, work)
        name = str(work["id"])
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._celery.send_task(TASK, [name, prompt, max_tokens], queue=QUEUE, ignore_result=True)
        token_ids = await self._waiting[name]
        await self._run(SETTLE, work)
        return name, token_ids

    async def _run(self, statement: str, values: dict[str, Any]) -> None:
        async with self._pool.connection() as connection:
            row = await (await connection.execute(statement.encode(), values)).fetchone()
        assert row is not None

    async def _read(self) -> None:
        last = b"0"
        while True:
            streams: Any = await self._redis.xread({ANSWERS: last}, block=0)
            for entry_id, fields in streams[0][1]:
                last = entry_id
                self._waiting.pop(fields[b"id"].decode()).set_result(json.loads(fields[b"token_ids"]))


async def complete(request: HttpRequest) -> JsonResponse:
    """Answer one Completion."""
    asked = json.loads(request.body)
    name, token_ids = await (await _way()).complete(asked["prompt"], asked["max_tokens"])
    return JsonResponse({"id": name, "token_ids": token_ids})


async def _way() -> Way:
    if "way" not in _opened:
        _opened["way"] = Way()
        await _opened["way"].open()
    return _opened["way"]


_opened: dict[str, Way] = {}
urlpatterns = [path("v1/completions", complete)]
settings.configure(ALLOWED_HOSTS=["127.0.0.1"], ROOT_URLCONF=__name__, SECRET_KEY="of nothing", MIDDLEWARE=[])

from django.core.asgi import get_asgi_application  # noqa: E402 (it wants settings)

application = get_asgi_application()
