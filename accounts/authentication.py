"""Who sends a request: `Authorization: Bearer <key>`, looked up by its hash in one query at most; or a session."""

import asyncio
import time
from datetime import datetime, timedelta

import structlog
from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from accounts import recent_keys
from accounts.keys import digest_of, is_key_text
from accounts.models import ApiKey, User
from accounts.rates import begin_count, end_count, require_rate, require_rate_of_user
from accounts.selectors import find_key, find_key_async
from acsinfra.core.db import connection, give_back_connection
from acsinfra.core.errors import ApiError, ErrorCode, invalid_api_key

logger = structlog.get_logger(__name__)

LAST_USED_EVERY = timedelta(minutes=5)


class SessionAuthentication(BaseAuthentication):
    """Authenticates by the App's session, for the App's own doors to views of the API: no key, and so no key's cap.

    Only for paths outside /v1, where sessions are read and the CSRF token of what changes something is checked.
    """

    async def authenticate_async(self, request: Request) -> tuple[User, None]:
        """The signed-in User; `401 invalid_api_key`, or `429 rate_limited` past the User's rate."""
        user = await request._request.auser()
        await give_back_connection()
        if not isinstance(user, User):
            raise ApiError(ErrorCode.INVALID_API_KEY, "You are signed out. Sign in, and try again.")
        await require_rate_of_user(user)
        return user, None

    def authenticate(self, request: Request) -> None:
        """Never for a synchronous view: none has such a door."""
        return

    def authenticate_header(self, request: Request) -> str:
        """What `WWW-Authenticate` says: a browser must not ask for a password."""
        return "Session"


class ApiKeyAuthentication(BaseAuthentication):
    """Authenticates by API key; all that is wrong with a key gives the same 401."""

    async def authenticate_async(self, request: Request) -> tuple[User, ApiKey]:
        """The User and the key of `request`; `401 invalid_api_key`, or `429 rate_limited` past the key's rate."""
        digest = _digest_in(request)
        count = begin_count(digest)
        key = _accept(await _find_key(digest, count), request._request)
        await require_rate(key, digest=digest, begun=count)
        if _is_due(key.last_used_at):
            _note_use(key)
        return key.user, key

    def authenticate(self, request: Request) -> tuple[User, ApiKey]:
        """The same for a synchronous view, by the ORM and uncounted; no route of the API has one."""
        key = _accept(find_key(_digest_in(request)), request._request)
        if _is_due(key.last_used_at):
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())
        return key.user, key

    def authenticate_header(self, request: Request) -> str:
        """What `WWW-Authenticate` says."""
        return "Bearer"


async def _find_key(digest: bytes, count: "asyncio.Future[object] | None") -> ApiKey | None:
    if count is not None and recent_keys.is_kept(digest):
        recent = recent_keys.find(digest, generation=(await end_count(count)).generation)
        if recent is not None:
            return recent
    # Said before the look: what changes a row and then draws a generation is seen here, or has a newer one.
    generation = recent_keys.newest_generation()
    key = await find_key_async(digest)
    if key is not None:
        recent_keys.keep(digest, key, generation=generation)
    return key


def _digest_in(request: Request) -> bytes:
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    text = text.strip(" ")
    if scheme.lower() != "bearer" or not is_key_text(text):
        raise invalid_api_key()
    return digest_of(text)


def _accept(key: ApiKey | None, request: HttpRequest) -> ApiKey:
    if key is None or not key.is_working or not key.user.is_active:
        raise invalid_api_key()
    request.api_key = key  # type: ignore[attr-defined]
    return key


def _is_due(last_used_at: datetime | None) -> bool:
    return last_used_at is None or timezone.now() - last_used_at >= LAST_USED_EVERY


# Keys whose use this process is writing or has just written, so that a burst of requests starts one task.
_noted: dict[int, float] = {}
_writing: set[asyncio.Task[None]] = set()


def _note_use(key: ApiKey) -> None:
    """Write `last_used_at` beside the request: it is never delayed, and never fails, by this."""
    now = time.monotonic()
    if now - _noted.get(key.pk, -LAST_USED_EVERY.total_seconds()) < LAST_USED_EVERY.total_seconds():
        return
    if len(_noted) > 10_000:
        _noted.clear()
    _noted[key.pk] = now
    task = asyncio.get_running_loop().create_task(_write_use(key.pk))
    _writing.add(task)
    task.add_done_callback(_writing.discard)


async def _write_use(key_id: int) -> None:
    try:
        async with connection() as taken:
            await taken.execute(
                "UPDATE accounts_apikey SET last_used_at = now()"
                " WHERE id = %s AND (last_used_at IS NULL OR last_used_at <= now() - %s)",
                (key_id, LAST_USED_EVERY),
            )
    except Exception as error:  # noqa: BLE001 (nobody waits for this task)
        _noted.pop(key_id, None)
        logger.warning("last use of a key not written", error_type=type(error).__name__)
