"""The generation of all keys and Users: whatever changes one draws another, by which API processes see it at once."""

import uuid
from typing import Any, Final

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Model, QuerySet
from redis import Redis
from redis.exceptions import RedisError

logger = structlog.get_logger(__name__)

GENERATION: Final = "acs:keys"


def forget_everywhere() -> None:
    """Have every API process look keys up again, once the transaction that runs is committed."""
    # One draw says it of all that a transaction changes.
    if not any(called is _draw_generation for _, called, _ in transaction.get_connection().run_on_commit):
        transaction.on_commit(_draw_generation, robust=True)


def _draw_generation() -> None:
    try:
        with Redis.from_url(settings.BROKER_URL, socket_timeout=2, socket_connect_timeout=2) as redis:
            redis.set(GENERATION, uuid.uuid4().hex)
    except (RedisError, ValueError) as error:
        logger.warning("a change of a key or User acts a second later", reason=type(error).__name__)


class ChangesNoted[M: Model](QuerySet[M]):
    """A queryset whose `update` is noted as each `save` is."""

    def update(self, **changes: Any) -> int:
        """Change the rows, and have API processes look them up again."""
        changed = super().update(**changes)
        forget_everywhere()
        return changed
