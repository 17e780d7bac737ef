"""How many requests a key sends in a minute, right across API processes: Redis counts, in one script.

The count is under way while the key is looked up in the database, and so costs a request no round trip of its own; and
its answer says whether the key that was looked up just before may be taken again (`accounts.recent_keys`). While Redis
is away nothing is counted: reading must still work, and what needs Redis fails by itself.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final, cast

import structlog
from redis.exceptions import RedisError

from accounts import recent_keys
from accounts.generations import GENERATION
from accounts.models import ApiKey, User
from accounts.selectors import limit
from acsinfra.core.courier import BrokerAway, shared_courier
from acsinfra.core.errors import ApiError, ErrorCode

logger = structlog.get_logger(__name__)

PATIENCE_SECONDS: Final = 1.0
# So long nothing is asked of a Redis that was away: no request waits for it meanwhile.
AWAY_SECONDS: Final = 2.0
KNOWN_AT_MOST: Final = 10_000

# A hash of the key's requests in each second of the last minute, with their sum, so that a look costs no loop over
# them: `oldest` walks on by a step a second. Returns 0, or in how many seconds there is room again. A refused request
# does not count.
_COUNT: Final = """
local now, limit = tonumber(redis.call('TIME')[1]), tonumber(ARGV[1])
local had = redis.call('HMGET', KEYS[1], 'total', 'oldest')
local total, oldest = tonumber(had[1]) or 0, tonumber(had[2]) or now
if oldest > now or now - oldest > 120 then
  redis.call('DEL', KEYS[1])
  total, oldest = 0, now
end
while oldest <= now - 60 do
  local gone = redis.call('HGET', KEYS[1], oldest)
  if gone then
    total = total - gone
    redis.call('HDEL', KEYS[1], oldest)
  end
  oldest = oldest + 1
end
local has_room = total < limit
if has_room then
  total = total + 1
  redis.call('HINCRBY', KEYS[1], now, 1)
end
redis.call('HSET', KEYS[1], 'total', total, 'oldest', oldest)
redis.call('EXPIRE', KEYS[1], 61)
local generation = redis.call('GET', KEYS[2])
if has_room then return {0, generation} end
for second = oldest, now do
  total = total - (tonumber(redis.call('HGET', KEYS[1], second)) or 0)
  if total < limit then return {second + 60 - now, generation} end
end
return {60, generation}
"""

type _Asked = asyncio.Future[object]


@dataclass(frozen=True, slots=True)
class Count:
    """In how many seconds there is room for the request, 0 for now; and the generation of keys and Users in Redis.

    `generation` is None where Redis is away, and nothing was counted.
    """

    seconds: int
    generation: bytes | None


NOT_COUNTED: Final = Count(0, None)

# The keys that this process has met, by their digest: whose request to count, and against what, before it is looked up.
_known: dict[bytes, tuple[int, int]] = {}
_away_until = 0.0


def begin_count(digest: bytes) -> _Asked | None:
    """Begin to count a request of the key with this digest; None where only the look-up can tell which one it is."""
    known = _known.get(digest)
    return None if known is None else _ask(*known)


async def end_count(begun: _Asked | None) -> Count:
    """What came of `begin_count`."""
    return NOT_COUNTED if begun is None else await _answer(begun)


async def require_rate(key: ApiKey, *, digest: bytes, begun: _Asked | None) -> None:
    """Count the request, as `begin_count` began to, or raise `429 rate_limited` with `Retry-After`."""
    per_minute = limit(key.user, "requests_per_minute") or 0
    if _known.get(digest) != (key.pk, per_minute):
        if len(_known) >= KNOWN_AT_MOST:
            _known.clear()
        _known[digest] = (key.pk, per_minute)
        begun = None
    _require("This API key", await end_count(begun or _ask(key.pk, per_minute)), per_minute)


async def require_rate_of_user(user: User) -> None:
    """Count a request that `user` sends from the App, beside those of their keys, or raise `429 rate_limited`."""
    per_minute = limit(user, "requests_per_minute") or 0
    _require("The App", await end_count(_ask(f"user-{user.pk}", per_minute)), per_minute)


def _require(who: str, count: Count, per_minute: int) -> None:
    if count.seconds:
        raise ApiError(
            ErrorCode.RATE_LIMITED,
            f"{who} may send {per_minute:,} requests a minute; there is room again in {count.seconds} s.",
            headers={"Retry-After": str(count.seconds)},
        )


def _ask(sender: int | str, per_minute: int) -> _Asked | None:
    """The count under way; None while Redis is away."""
    if time.monotonic() < _away_until:
        return None
    names = (f"acs:rate:{sender}", GENERATION)
    count = shared_courier().ask("EVAL", _COUNT, len(names), *names, per_minute, patience=PATIENCE_SECONDS)
    # Of a request that goes away, or whose key turns out to be none, nobody hears the answer.
    count.add_done_callback(_hear)
    return count


def _hear(count: _Asked) -> None:
    if not count.cancelled():
        count.exception()


async def _answer(asked: _Asked) -> Count:
    global _away_until
    if asked.cancelled():
        # Who waited for it before has given it up.
        return NOT_COUNTED
    try:
        if not asked.done():
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asked
        seconds, generation = cast("tuple[int, bytes | None]", asked.result())
    except (BrokerAway, RedisError, TimeoutError) as error:
        _away_until = time.monotonic() + AWAY_SECONDS
        logger.warning("requests are not counted: the broker is away", reason=type(error).__name__)
        return NOT_COUNTED
    recent_keys.note_generation(generation or b"")
    return Count(seconds, generation or b"")
