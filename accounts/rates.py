"""How many requests a key sends in a minute, right across API processes: Redis counts, in one script.

The count is under way while the key is looked up in the database, and so costs a request no round trip of its own.
While Redis is away nothing is counted: reading must still work, and what needs Redis fails by itself.
"""

import asyncio
import time
from typing import Final

import structlog
from redis.exceptions import RedisError

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
if has_room then return 0 end
for second = oldest, now do
  total = total - (tonumber(redis.call('HGET', KEYS[1], second)) or 0)
  if total < limit then return second + 60 - now end
end
return 60
"""

type _Count = asyncio.Future[object]

# The keys that this process has met, by their digest: whose request to count, and against what, before it is looked up.
_known: dict[bytes, tuple[int, int]] = {}
_away_until = 0.0


def begin_count(digest: bytes) -> _Count | None:
    """Begin to count a request of the key with this digest; None where only the look-up can tell which one it is."""
    known = _known.get(digest)
    return None if known is None else _ask(*known)


async def require_rate(key: ApiKey, *, digest: bytes, begun: _Count | None) -> None:
    """Count the request, as `begin_count` began to, or raise `429 rate_limited` with `Retry-After`."""
    per_minute = limit(key.user, "requests_per_minute") or 0
    if _known.get(digest) != (key.pk, per_minute):
        if len(_known) >= KNOWN_AT_MOST:
            _known.clear()
        _known[digest] = (key.pk, per_minute)
        begun = None
    await _require("This API key", begun or _ask(key.pk, per_minute), per_minute)


async def require_rate_of_user(user: User) -> None:
    """Count a request that `user` sends from the App, beside those of their keys, or raise `429 rate_limited`."""
    per_minute = limit(user, "requests_per_minute") or 0
    await _require("The App", _ask(f"user-{user.pk}", per_minute), per_minute)


async def _require(who: str, count: _Count | None, per_minute: int) -> None:
    seconds = 0 if count is None else await _answer(count)
    if seconds:
        raise ApiError(
            ErrorCode.RATE_LIMITED,
            f"{who} may send {per_minute:,} requests a minute; there is room again in {seconds} s.",
            headers={"Retry-After": str(seconds)},
        )


def _ask(sender: int | str, per_minute: int) -> _Count | None:
    """The count under way; None while Redis is away."""
    if time.monotonic() < _away_until:
        return None
    count = shared_courier().ask("EVAL", _COUNT, 1, f"acs:rate:{sender}", per_minute, patience=PATIENCE_SECONDS)
    # Of a request that goes away, or whose key turns out to be none, nobody hears the answer.
    count.add_done_callback(_hear)
    return count


def _hear(count: _Count) -> None:
    if not count.cancelled():
        count.exception()


async def _answer(count: _Count) -> int:
    """In how many seconds there is room; 0: now, or Redis is away."""
    global _away_until
    try:
        if not count.done():
            async with asyncio.timeout(PATIENCE_SECONDS):
                await count
        seconds = count.result()
    except (BrokerAway, RedisError, TimeoutError) as error:
        _away_until = time.monotonic() + AWAY_SECONDS
        logger.warning("requests are not counted: the broker is away", reason=type(error).__name__)
        return 0
    assert isinstance(seconds, int)
    return seconds
