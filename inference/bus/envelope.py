"""A Completion's way to the workers: the very message that Celery would send, pushed without Celery's blocking client.

`apply_async` blocks the event loop for a third of a millisecond; this is one command among the courier's. A test
holds the format against a real Celery worker and against `apply_async` itself.
"""

import base64
import uuid

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

_json = msgspec.json.Encoder()


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The task's one argument. `work` is a CompletionWork as JSON, or None where it lies in `pieces` pieces."""

    request_id: str
    reply_to: str
    deadline: float
    pieces: int = 0
    work: str | None = None


def celery_message(*, task: str, queue: str, kwargs: dict[str, object]) -> bytes:
    """The message by which Celery (5.7, protocol 2, kombu's Redis transport) runs `task` with `kwargs` from `queue`."""
    task_id = str(uuid.uuid4())
    body = _json.encode([[], kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return _json.encode(
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
                "delivery_tag": str(uuid.uuid4()),
            },
        }
    )


async def publish(work: CompletionWork, *, reply_to: str, courier: Courier) -> None:
    """Put `work` on its model's queue, for answers to API process `reply_to`; raises BrokerAway."""
    encoded = _json.encode(work)
    envelope = Envelope(request_id=work.request_id, reply_to=reply_to, deadline=work.deadline)
    if len(encoded) <= PIECE_BYTES:
        envelope = msgspec.structs.replace(envelope, work=encoded.decode())
    else:
        envelope = msgspec.structs.replace(envelope, pieces=await _leave_pieces(work.request_id, encoded, courier))
    queue = keys.queue(work.model)
    message = celery_message(task=TASK, queue=queue, kwargs={"envelope": msgspec.to_builtins(envelope)})
    await courier.ask("EVAL", PUBLISH, 2, queue, keys.published(work.request_id), message, PUBLISHED_FOR_SECONDS)


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
