"""The places of an API key: how many of its Completions run at once, and how many more wait their turn in order.

Redis decides, in one script, so that it holds across API processes. A member is `<API process>/<request id>`; members
of a process that no longer lives vanish. Whoever frees a place gives it to the first that waits, and tells that one's
API process through its reply stream.
"""

import asyncio
import math
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from acsinfra.core.courier import Courier
from acsinfra.core.errors import ApiError, ErrorCode

GRANTED = 1
WAITS = 0
FULL = -1
RETRY_AFTER_SECONDS = 1
ALL_ASK_EVERY = 5

_SHARED = """
local running, waiting, turn, swept = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me, at_once = ARGV[1], tonumber(ARGV[2])
local known = {}
local function lives(member)
  local process = string.match(member, '^([^/]+)/')
  if known[process] == nil then known[process] = redis.call('EXISTS', 'acs:alive:' .. process) == 1 end
  return known[process]
end
local function sweep()
  -- It looks at every member: once a second, however many ask.
  if not redis.call('SET', swept, '1', 'PX', 1000, 'NX') then return end
  for _, member in ipairs(redis.call('SMEMBERS', running)) do
    if not lives(member) then redis.call('SREM', running, member) end
  end
  for _, member in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
    if not lives(member) then redis.call('ZREM', waiting, member) end
  end
end
local function promote()
  while redis.call('SCARD', running) < at_once do
    local first = redis.call('ZPOPMIN', waiting)[1]
    if not first then return end
    if lives(first) then
      redis.call('SADD', running, first)
      if first ~= me then
        local process, request = string.match(first, '^([^/]+)/(.*)$')
        redis.call('XADD', 'acs:replies:' .. process, 'NOMKSTREAM', '*', 'place', request)
      end
    end
  end
end
"""

# Asked again by one that has a place or waits, it answers how things stand (and lets in a waiting one that Redis lost).
CLAIM = (
    _SHARED
    + """
local queued = tonumber(ARGV[3])
if redis.call('SISMEMBER', running, me) == 1 then return 1 end
local day = 86400
if redis.call('ZSCORE', waiting, me) then
  sweep(); promote()
  return redis.call('SISMEMBER', running, me)
end
local function is_free()
  return redis.call('ZCARD', waiting) == 0 and redis.call('SCARD', running) < at_once
end
if not is_free() then sweep(); promote() end
if is_free() then
  redis.call('SADD', running, me)
  redis.call('EXPIRE', running, day)
  return 1
end
if redis.call('ZCARD', waiting) >= queued then return -1 end
redis.call('ZADD', waiting, redis.call('INCR', turn), me)
redis.call('EXPIRE', waiting, day)
redis.call('EXPIRE', turn, day)
return 0
"""
)

RELEASE = (
    _SHARED
    + """
redis.call('SREM', running, me)
redis.call('ZREM', waiting, me)
promote()
return 1
"""
)


@dataclass(eq=False)
class Place:
    """A request's place, or its turn in the line; `release` it exactly when the request is over."""

    key: str
    member: str
    at_once: int
    queued: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def request_id(self) -> str:
        """The request that has the place."""
        return self.member.partition("/")[2]

    def grant(self) -> None:
        """Its turn has come."""
        if not self.granted.done():
            self.granted.set_result(None)

    def redis_keys(self) -> tuple[str, str, str, str]:
        """The keys of the scripts."""
        base = f"acs:places:{self.key}"
        return f"{base}:running", f"{base}:waiting", f"{base}:turn", f"{base}:swept"


class Places:
    """The places that this API process's requests have or wait for."""

    def __init__(self, *, process: str, courier: Courier) -> None:
        self._process = process
        self._courier = courier
        self._waiting: dict[str, Place] = {}
        self._refused: list[Place] = []
        self._looks = 0

    async def claim(self, *, key: str, request_id: str, at_once: int, queued: int) -> Place:
        """Get in line for a place of API key `key`; the caller awaits `granted` and releases it in every case.

        Raises `429 queue_full` where `queued` requests wait already, and BrokerAway.
        """
        place = Place(key, f"{self._process}/{request_id}", at_once, queued)
        # In the table first: the word that its turn has come may overtake the answer to the claim.
        self._waiting[request_id] = place
        try:
            answer = await self._ask(place)
        except BaseException:
            self.release(place)
            raise
        if answer == FULL:
            self._waiting.pop(request_id, None)
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"This key has {at_once} requests running and {queued} waiting, which is all it may have.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        if answer == GRANTED:
            self.grant(request_id)
        return place

    def grant(self, request_id: str) -> None:
        """Let the request in: Redis gave it its place."""
        if place := self._waiting.pop(request_id, None):
            place.grant()

    def release(self, place: Place) -> None:
        """Give the place back, or leave the line; the next in line gets it."""
        self._waiting.pop(place.request_id, None)
        script = ("EVAL", RELEASE, 4, *place.redis_keys(), place.member, place.at_once)

        def hear(answer: asyncio.Future[object]) -> None:
            # A Redis whose disk is full refuses it. Left so, the key would lack a place while this process lives.
            if isinstance(answer.exception(), RedisError):
                self._refused.append(place)

        self._courier.ask(*script, patience=math.inf).add_done_callback(hear)

    async def look_again(self) -> None:
        """Ask how things stand: a process that died holds no place, and no word may be lost.

        One of each key asks every time, which frees the places of the dead; all that wait, now and then. What Redis
        refused to take back is given back again.
        """
        refused, self._refused = self._refused, []
        for place in refused:
            self.release(place)
        self._looks += 1
        waiting = list(self._waiting.values())
        if self._looks % ALL_ASK_EVERY:
            waiting = list({place.key: place for place in waiting}.values())
        for place, answer in zip(waiting, await asyncio.gather(*map(self._ask, waiting)), strict=True):
            if answer == GRANTED:
                self.grant(place.request_id)

    async def _ask(self, place: Place) -> object:
        return await self._courier.ask("EVAL", CLAIM, 4, *place.redis_keys(), place.member, place.at_once, place.queued)
