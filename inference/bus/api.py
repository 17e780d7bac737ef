"""The API process's end of the bus: places, publishing, inboxes, and the watch over them.

Two connections to Redis however many requests wait: the courier's, which sends, and the reader's. It starts with the
first request, so that an API process starts without Redis too, and belongs to the event loop of that request.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any

import structlog
from django.conf import settings
from redis.exceptions import RedisError

from acsinfra.core.courier import BrokerAway, Courier
from acsinfra.core.errors import ApiError, ErrorCode
from inference.bus import keys
from inference.bus.envelope import publish, withdraw
from inference.bus.frames import ALIVE_FOR, RENEW_EVERY, REPLIES_FOR, Cancel, Fault
from inference.bus.lost import send_lost_again
from inference.bus.places import Places
from inference.bus.replies import Inbox, ReplyReader, post_control
from inference.wire import CompletionWork

logger = structlog.get_logger(__name__)

WATCH_EVERY_SECONDS = 1.0
# A message that no worker has taken after this long makes the watch ask whether there is any worker.
UNTAKEN_SECONDS = 2.0
# A worker that stops a request says at once what it counted; one that died, or that has only just taken it, may not.
LAST_COUNT_SECONDS = 10.0
COUNT_PATIENCE_SECONDS = 60.0

# Prompt tokens and completion tokens, as an engine counted them.
type Count = tuple[int, int]

# The reply stream is there before the first message goes out, and comes back if Redis has lost it. Returns which
# generation of Redis's data this is.
RENEW = """
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  redis.call('XADD', KEYS[1], '*', 'hello', '')
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3], 'NX')
return redis.call('GET', KEYS[3])
"""


def read_count(left: object) -> Count | None:
    """What a worker left under `keys.count`."""
    if not isinstance(left, bytes):
        return None
    prompt_tokens, completion_tokens = map(int, left.split())
    return prompt_tokens, completion_tokens


class Bus:
    """One API process's (or one event loop's) way to the inference workers. Made by `running_bus`."""

    def __init__(self, *, url: str, is_served: Callable[[str], Awaitable[bool]]) -> None:
        self.process = uuid.uuid4().hex
        self._is_served = is_served
        self._inboxes: dict[str, Inbox] = {}
        self._courier = Courier(url)
        self.places = Places(process=self.process, courier=self._courier)
        self._reader = ReplyReader(
            url=url,
            process=self.process,
            inboxes=self._inboxes,
            grant_place=self.places.grant,
            renew=lambda: self._courier.post(*self._renewal()),
        )
        self._watch = asyncio.create_task(self._watch_over(), name="bus-watch")
        self._detached: set[asyncio.Task[Any]] = set()
        self.is_closing = False
        self._generation: object = None
        self._emptied_at = -math.inf

    async def ready(self) -> None:
        """Return once this process can be answered; raises BrokerAway."""
        await self._renew()

    @property
    def waiting(self) -> int:
        """Requests that wait for an answer or are being answered."""
        return len(self._inboxes)

    async def send(self, work: CompletionWork) -> Inbox:
        """Publish `work`; its answer comes into the inbox, which ends with `close_inbox`. Raises BrokerAway."""
        inbox = Inbox(request_id=work.request_id, model=work.model, courier=self._courier)
        self._inboxes[work.request_id] = inbox
        try:
            inbox.posted = await publish(work, reply_to=self.process, courier=self._courier)
        except BaseException:
            self.close_inbox(inbox, is_over=False)
            raise
        inbox.published_at = time.monotonic()
        return inbox

    def close_inbox(self, inbox: Inbox, *, is_over: bool) -> None:
        """Read no more; unless the answer `is_over`, the engine is told to stop."""
        # What was sent again may be there twice: nobody waits for the other.
        if self._inboxes.pop(inbox.request_id, None) is not None and (not is_over or inbox.sendings > 1):
            self._cancel(inbox)

    async def stop(self, inbox: Inbox) -> Count | None:
        """Stop the request in its engine, and return what was counted of it until then; None where nobody knows."""
        if inbox.is_in_line and await self._withdraw(inbox):
            return 0, 0
        last = inbox.skip_to_last()
        try:
            self._cancel(inbox)
            async with asyncio.timeout(LAST_COUNT_SECONDS):
                frame = await last
        except TimeoutError:
            return await self.left_count(inbox.request_id)
        finally:
            self._inboxes.pop(inbox.request_id, None)
        if isinstance(frame, Fault) and not frame.is_counted:
            return await self.left_count(inbox.request_id)
        return frame.prompt_tokens, frame.completion_tokens

    async def _withdraw(self, inbox: Inbox) -> bool:
        """Take a request that waits in its queue out of it; False where a worker may have it."""
        # What was sent again may be there twice.
        if inbox.posted is None or inbox.sendings > 1:
            return False
        try:
            is_out = await withdraw(inbox.posted, self._courier)
        except (BrokerAway, RedisError):
            return False
        if is_out:
            self._inboxes.pop(inbox.request_id, None)
            # A Redis that came back from its file may have in the queue what a worker has taken.
            self._cancel(inbox)
        return is_out

    async def left_count(self, request_id: str) -> Count | None:
        """What a worker counted last of the request, though it may have died since; None where nobody knows."""
        try:
            left = await self._courier.ask("GET", keys.count(request_id), patience=COUNT_PATIENCE_SECONDS)
        except BrokerAway:
            return None
        return read_count(left)

    def forget_count(self, request_id: str) -> None:
        """The request's tokens are charged: its count is needed no more."""
        self._courier.post("DEL", keys.count(request_id), patience=COUNT_PATIENCE_SECONDS)

    def detach[Result](self, work: Coroutine[Any, Any, Result], *, name: str) -> asyncio.Task[Result]:
        """Run `work` to its end, whoever waits for it; this process does not stop before."""
        task = asyncio.create_task(work, name=name)
        self._detached.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._detached.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError):
            logger.error("What a request left to be done failed.", task=task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Stop, once all that was detached has ended: what still waits is cancelled, and this process's keys go."""
        self.is_closing = True
        deadline = time.monotonic() + settings.ENGINE_TIME_LIMIT.total_seconds() + LAST_COUNT_SECONDS
        # What ends may detach more: an answer that is over has its Hold settled.
        while self._detached and time.monotonic() < deadline:
            await asyncio.wait(self._detached, timeout=deadline - time.monotonic())
        for task in list(self._detached):
            task.cancel()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        for inbox in list(self._inboxes.values()):
            self.close_inbox(inbox, is_over=False)
        await self._reader.close()
        self._courier.post("DEL", keys.alive(self.process), keys.replies(self.process))
        await self._courier.close()

    def _cancel(self, inbox: Inbox) -> None:
        # The mark is for a worker that takes the message after the word has gone by.
        mark_seconds = max(60, int(settings.ENGINE_TIME_LIMIT.total_seconds()))
        self._courier.post("SET", keys.cancelled(inbox.request_id), "1", "EX", mark_seconds)
        post_control(self._courier, inbox.model, Cancel(inbox.request_id))

    def _renewal(self) -> tuple[str | int, ...]:
        forget_ms = [int(span.total_seconds() * 1000) for span in (REPLIES_FOR, ALIVE_FOR)]
        names = (keys.replies(self.process), keys.alive(self.process), keys.GENERATION)
        return ("EVAL", RENEW, len(names), *names, *forget_ms, uuid.uuid4().hex)

    async def _renew(self) -> None:
        generation = await self._courier.ask(*self._renewal())
        if self._generation not in (None, generation):
            logger.warning("redis lost its data")
            self._emptied_at = time.monotonic()
        self._generation = generation

    async def _watch_over(self) -> None:
        renewed_at = 0.0
        while True:
            await asyncio.sleep(WATCH_EVERY_SECONDS)
            try:
                if time.monotonic() - renewed_at >= RENEW_EVERY.total_seconds():
                    await self._renew()
                    renewed_at = time.monotonic()
                await self.places.look_again()
                await self._fail_what_died()
                await self._fail_what_nobody_serves()
                connected_at = max(self._courier.connected_at, self._reader.connected_at)
                await send_lost_again(self._inboxes, courier=self._courier, connected_at=connected_at)
            except BrokerAway:
                continue
            except Exception:
                logger.exception("The watch over waiting requests failed; it goes on.")

    async def _fail_what_died(self) -> None:
        """End the requests of workers whose heartbeat expired."""
        workers = {inbox.worker for inbox in self._inboxes.values() if inbox.worker is not None}
        if not workers:
            return
        silent = {worker for worker in workers if await self._courier.ask("EXISTS", keys.worker(worker)) == 0}
        if not silent:
            return
        # A Redis that came back empty, or was emptied, knows a worker again with its next heartbeat only.
        await self._renew()
        emptied_at = max(self._courier.connected_at, self._reader.connected_at, self._emptied_at)
        if time.monotonic() - emptied_at < 2 * settings.HEARTBEAT.total_seconds():
            return
        for worker in silent:
            if await self._courier.ask("EXISTS", keys.worker(worker)) == 0:
                logger.error("An inference worker went silent.", worker=worker)
                self._fail(
                    [inbox for inbox in self._inboxes.values() if inbox.worker == worker],
                    ErrorCode.ENGINE_ERROR,
                    "The inference worker died under this request.",
                )

    async def _fail_what_nobody_serves(self) -> None:
        """End the requests that no worker took and that no worker is there for."""
        untaken_since = time.monotonic() - UNTAKEN_SECONDS
        untaken = [i for i in self._inboxes.values() if i.worker is None and i.published_at < untaken_since]
        for model in {inbox.model for inbox in untaken}:
            if not await self._is_served(model):
                nobodys = [inbox for inbox in untaken if inbox.model == model]
                for inbox in nobodys:
                    if inbox.posted is not None:
                        await withdraw(inbox.posted, self._courier)
                self._fail(
                    nobodys,
                    ErrorCode.MODEL_UNAVAILABLE,
                    f"No engine is running for model {model!r} any more.",
                )

    def _fail(self, inboxes: list[Inbox], code: ErrorCode, message: str) -> None:
        for inbox in inboxes:
            self._cancel(inbox)
            inbox.put(Fault(inbox.request_id, code.value, message, is_counted=False))


_bus: Bus | None = None
_loop: asyncio.AbstractEventLoop | None = None
_starting: asyncio.Lock | None = None


async def running_bus(*, is_served: Callable[[str], Awaitable[bool]]) -> Bus:
    """The bus of the running event loop, started at first use; raises BrokerAway.

    `is_served` says whether any engine of a model is registered.
    """
    global _bus, _loop, _starting
    loop = asyncio.get_running_loop()
    if _bus is not None and _loop is loop:
        return _bus
    if _starting is None or _loop is not loop:
        _bus, _loop, _starting = None, loop, asyncio.Lock()
    async with _starting:
        if _bus is None:
            # Its tasks outlive the first request, whose id must not stand in their log lines.
            bus = Context().run(lambda: Bus(url=settings.BROKER_URL, is_served=is_served))
            try:
                await bus.ready()
            except BaseException:
                await bus.close()
                raise
            _bus = bus
    return _bus


@asynccontextmanager
async def bus_while_serving() -> AsyncGenerator[None]:
    """What the API serves inside: at its end the running event loop's bus is closed, if one was started."""
    global _bus
    yield
    if _bus is not None and _loop is asyncio.get_running_loop():
        bus, _bus = _bus, None
        await bus.close()
