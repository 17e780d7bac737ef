"""A Completion's way to the workers: the very message that Celery would send, pushed without Celery's blocking client.

`apply_async` blocks the event loop for a third of a millisecond; this is one command among the courier's. A test
holds the format against a real Celery worker and against `apply_async` itself.
"""

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from acsinfra.core.courier import Courier
from inference.bus import keys
from inference.bus.frames import PIECE_BYTES
from inference.wire import CompletionWork

TASK = "inference.complete"
# Pieces and marks outlive what they belong to by far; a worker takes the pieces away as it reads them.
PIECES_FOR_SECONDS = 3600
PUBLISHED_FOR_SECONDS = 60

# Once for each request, though the connection was lost after the first try had arrived.
PUBLISH = """
if redis.call('SET', KEYS[2], '1', 'NX', 'EX', ARGV[2]) then redis.call('LPUSH', KEYS[1], ARGV[1]) end
return 1
"""
# The mark holds the number of the sending, so that this too may be tried again: a worker may have the message by then.
# It goes to the end that workers take from, which is where the search begins.
SEND_AGAIN = """
if redis.call('GET', KEYS[2]) == ARGV[2] then return 1 end
if redis.call('LPOS', KEYS[1], ARGV[1], 'RANK', -1) then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('RPUSH', KEYS[1], ARGV[1])
return 1
"""

_json = msgspec.json.Encoder()


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The task's one argument. `work` is a CompletionWork as JSON, or None where it lies in `pieces` pieces."""

    request_id: str
    reply_to: str
    deadline: float
    pieces: int = 0
    work: str | None = None


@dataclass(frozen=True, slots=True)
class Posted:
    """Work that was published, from which its message can be made again to the byte; no copy of it is kept."""

    work: CompletionWork
    reply_to: str
    pieces: int


def celery_message(*, task: str, queue: str, kwargs: dict[str, object], task_id: str = "") -> bytes:
    """The message by which Celery (5.7, protocol 2, kombu's Redis transport) runs `task` with `kwargs` from `queue`.

    With a `task_id` it is a pure function of its arguments.
    """
    task_id = task_id or str(uuid.uuid4())
    body = _json.encode([[], kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return encode_message(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {
                "lang": "py",
                "task": task,
                "id": task_id,
                "shadow": None,
                "eta": None,
                "expires": None,
                "group": None,
                "group_index": None,
                "retries": 0,
                "timelimit": [None, None],
                "root_id": task_id,
                "parent_id": None,
                # Celery logs these where it logs arguments; prompts never appear in a log.
                "argsrepr": "()",
                "kwargsrepr": "{}",
                "origin": "api",
                "ignore_result": True,
                "replaced_task_nesting": 0,
                "stamped_headers": None,
                "stamps": {},
            },
            "properties": {
                "correlation_id": task_id,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": task_id,
            },
        }
    )


def encode_message(message: Mapping[str, Any]) -> bytes:
    """A message as it lies in its queue; what was decoded from there becomes the same bytes again."""
    return _json.encode(message)


async def publish(work: CompletionWork, *, reply_to: str, courier: Courier) -> Posted:
    """Put `work` on its model's queue, for answers to API process `reply_to`; raises BrokerAway."""
    encoded = _json.encode(work)
    pieces = 0 if len(encoded) <= PIECE_BYTES else await _leave_pieces(work.request_id, encoded, courier)
    posted = Posted(work, reply_to, pieces)
    names = (keys.queue(work.model), keys.published(work.request_id))
    await courier.ask("EVAL", PUBLISH, 2, *names, _message(posted, encoded), PUBLISHED_FOR_SECONDS)
    return posted


async def is_in_line(posted: Posted, courier: Courier) -> bool:
    """Whether the message lies in its queue still; raises BrokerAway."""
    position = await courier.ask("LPOS", keys.queue(posted.work.model), _message(posted), "RANK", -1)
    return position is not None


async def send_again(posted: Posted, *, sending: int, courier: Courier) -> bool:
    """Put the message back, to be taken next, unless it lies in its queue; returns whether it was gone.

    `sending` is another number each time: the first publishing was 1. Raises BrokerAway.
    """
    request_id = posted.work.request_id
    if posted.pieces:
        # They went where the message went, or with a worker that had begun to read them.
        await _leave_pieces(request_id, _json.encode(posted.work), courier)
    names = (keys.queue(posted.work.model), keys.published(request_id))
    command = ("EVAL", SEND_AGAIN, 2, *names, _message(posted), sending, PUBLISHED_FOR_SECONDS)
    return await courier.ask(*command) == 1


def _message(posted: Posted, encoded: bytes | None = None) -> bytes:
    """The message of what was posted; `encoded` is its work, where that is at hand."""
    work = posted.work
    envelope = Envelope(
        request_id=work.request_id,
        reply_to=posted.reply_to,
        deadline=work.deadline,
        pieces=posted.pieces,
        work=None if posted.pieces else (encoded or _json.encode(work)).decode(),
    )
    kwargs: dict[str, object] = {"envelope": msgspec.to_builtins(envelope)}
    return celery_message(task=TASK, queue=keys.queue(work.model), kwargs=kwargs, task_id=work.request_id)


async def _leave_pieces(request_id: str, encoded: bytes, courier: Courier) -> int:
    """Leave large work in Redis piece by piece; returns how many. Numbered, so that a piece sent twice is one."""
    key = keys.pieces(request_id)
    starts = range(0, len(encoded), PIECE_BYTES)
    for number, start in enumerate(starts):
        await courier.ask("HSET", key, number, encoded[start : start + PIECE_BYTES])
        if number == 0:
            await courier.ask("EXPIRE", key, PIECES_FOR_SECONDS)
    return len(starts)


async def read_work(envelope: Envelope, courier: Courier) -> CompletionWork | None:
    """The work in `envelope`, fetched where it lies in pieces; None where they are gone."""
    if envelope.work is not None:
        return msgspec.json.decode(envelope.work, type=CompletionWork)
    key = keys.pieces(envelope.request_id)
    pieces: list[bytes] = []
    for number in range(envelope.pieces):
        piece = await courier.ask("HGET", key, number)
        if not isinstance(piece, bytes):
            return None
        pieces.append(piece)
    courier.post("DEL", key)
    return msgspec.json.decode(b"".join(pieces), type=CompletionWork)
