"""What travels between API processes and inference workers besides the work itself, as msgpack.

Workers send `Batch`es of frames to an API process's reply stream; API processes send `Cancel` and `Credit` to a
model's control stream. Frames with `data` count against a window, so that neither side nor Redis holds more of an
answer than that, however slowly the client reads.
"""

from datetime import timedelta

import msgspec

from acsinfra.core.errors import ApiError, ErrorCode

# The largest piece of an answer, and how much of one answer may be unread: 8 pieces.
PIECE_BYTES = 256 * 1024
WINDOW_BYTES = 8 * PIECE_BYTES
# How much is read before the API says so: small answers never cost a message.
CREDIT_EVERY = WINDOW_BYTES // 4

# What says that an API process lives is renewed every few seconds and forgotten after these.
RENEW_EVERY = timedelta(seconds=3)
ALIVE_FOR = timedelta(seconds=15)
REPLIES_FOR = timedelta(seconds=30)


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """A worker has the request now; `worker` is its Engine row's id."""

    request_id: str
    worker: str


class Body(msgspec.Struct, frozen=True, array_like=True, tag="body"):
    """A piece of an answer's JSON; `total` is the length of all of it in bytes."""

    request_id: str
    total: int
    data: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """The JSON of one chunk of a stream."""

    request_id: str
    data: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The answer is whole; the tokens as the engine counted them."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """The request was stopped because nobody waits for it any more; the tokens until then."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """The answer is an error, or broke off with one; the tokens until then.

    `is_counted` is False where the API process itself makes the fault, and knows no count.
    """

    request_id: str
    code: str
    message: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_counted: bool = True

    def error(self) -> ApiError:
        """The error as the API answers it."""
        return ApiError(ErrorCode(self.code), self.message)


Final = End | Stopped | Fault
Frame = Taken | Body | Chunk | Final


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Frames of one worker to one API process. `number` counts up, so that a batch sent twice is read once."""

    worker: str
    number: int
    frames: list[Frame]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for the request any more."""

    request_id: str


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """The client has read this many bytes of the answer's frames, in all."""

    request_id: str
    read: int


Control = Cancel | Credit

_encoder = msgspec.msgpack.Encoder()
encode_batch = _encoder.encode
encode_control = _encoder.encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_control = msgspec.msgpack.Decoder[Control](Control).decode
