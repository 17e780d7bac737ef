"""Keys that this API process has just looked up: requests that follow each other closely share one look.

A key is taken from here for KEPT_SECONDS at most, and only while Redis says, in the answer that counts the request
anyway (`accounts.rates`), that no key and no User was changed since. Whatever changes one draws a new generation, so
that a key that is revoked is refused in the next request, by every API process. What changes rows behind Django's back,
or while Redis is away, acts KEPT_SECONDS later.
"""

import time
from typing import Any, Final, NamedTuple

from django.db.models.signals import post_delete, post_save

from accounts.generations import forget_everywhere
from accounts.models import ApiKey, User

KEPT_SECONDS: Final = 1.0
KEPT_AT_MOST: Final = 1_000


class _Recent(NamedTuple):
    """A key, with its User, as it was at `looked_at` (monotonic) and at least since `generation` was the newest."""

    key: ApiKey
    generation: bytes
    looked_at: float


_recent: dict[bytes, _Recent] = {}
_newest: bytes | None = None


def note_generation(generation: bytes) -> None:
    """Redis has just said which generation is the newest."""
    global _newest
    _newest = generation


def newest_generation() -> bytes | None:
    """What Redis said last; None where it has said nothing yet."""
    return _newest


def keep(digest: bytes, key: ApiKey, *, generation: bytes | None) -> None:
    """Keep a key that was looked up after Redis had said `generation`."""
    if generation is None:
        return
    if len(_recent) >= KEPT_AT_MOST:
        _recent.clear()
    _recent[digest] = _Recent(key, generation, time.monotonic())


def is_kept(digest: bytes) -> bool:
    """Whether it is worth asking for the key's generation."""
    recent = _recent.get(digest)
    return recent is not None and time.monotonic() - recent.looked_at < KEPT_SECONDS


def find(digest: bytes, *, generation: bytes | None) -> ApiKey | None:
    """The key, if it is here and nothing has changed until `generation`. It is shared: nobody may change it."""
    recent = _recent.get(digest)
    if recent is None or generation is None:
        return None
    if generation != recent.generation or time.monotonic() - recent.looked_at >= KEPT_SECONDS:
        del _recent[digest]
        return None
    return recent.key


def _note_saved(*, created: bool, **_: Any) -> None:
    # Nobody has looked for a new one, or found it.
    if not created:
        forget_everywhere()


def _note_deleted(**_: Any) -> None:
    forget_everywhere()


def connect() -> None:
    """Hear of each key and User that is changed; for `AppConfig.ready`. Their querysets' `update` says so too."""
    for model in (ApiKey, User):
        post_save.connect(_note_saved, sender=model, dispatch_uid="recent-keys")
        post_delete.connect(_note_deleted, sender=model, dispatch_uid="recent-keys")
