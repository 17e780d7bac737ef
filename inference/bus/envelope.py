"""A Completion's way to the workers of its model: one message in a list of Redis, which one of them takes.

No Celery task: a Completion belongs to the event loops at both ends, and Celery's way through its own loop and a pool
of threads cost a worker as much CPU as the engine's front itself. A message that is lost in a worker's hands is sent
again (`inference.bus.lost`), so nothing that Celery would add is missed.
"""

from dataclasses import dataclass

import msgspec

from acsinfra.core.courier import Courier
from inference.bus import keys
from inference.bus.frames import PIECE_BYTES
from inference.wire import CompletionWork

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
_NO_WORK = msgspec.Raw(b"null")


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message: who answers whom by when. `work` is a CompletionWork's JSON, unless it lies in `pieces` pieces."""

    request_id: str
    reply_to: str
    deadline: float
    pieces: int = 0
    work: msgspec.Raw = _NO_WORK


decode_envelope = msgspec.json.Decoder(Envelope).decode
_decode_work = msgspec.json.Decoder(CompletionWork).decode


@dataclass(frozen=True, slots=True)
class Posted:
    """Work that was published, from which its message can be made again to the byte; no copy of it is kept."""

    work: CompletionWork
    reply_to: str
    pieces: int


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


async def withdraw(posted: Posted, courier: Courier) -> bool:
    """Take the message out of its queue; False where it isn't there: a worker has it. Raises BrokerAway."""
    taken_out = await courier.ask("LREM", keys.queue(posted.work.model), -1, _message(posted))
    if taken_out == 1 and posted.pieces:
        courier.post("DEL", keys.pieces(posted.work.request_id))
    return taken_out == 1


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
    """The message of what was posted, always to the same bytes; `encoded` is its work, where that is at hand."""
    work = posted.work
    return _json.encode(
        Envelope(
            request_id=work.request_id,
            reply_to=posted.reply_to,
            deadline=work.deadline,
            pieces=posted.pieces,
            work=_NO_WORK if posted.pieces else msgspec.Raw(encoded or _json.encode(work)),
        )
    )


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
    if not envelope.pieces:
        return _decode_work(envelope.work)
    key = keys.pieces(envelope.request_id)
    pieces: list[bytes] = []
    for number in range(envelope.pieces):
        piece = await courier.ask("HGET", key, number)
        if not isinstance(piece, bytes):
            return None
        pieces.append(piece)
    courier.post("DEL", key)
    return _decode_work(b"".join(pieces))
