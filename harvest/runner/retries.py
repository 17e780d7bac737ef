"""Writing to a database that was restarted a moment ago."""

import time
from collections.abc import Callable
from typing import Final

import structlog
from django.db import DatabaseError, connections

logger = structlog.get_logger(__name__)

# In all well within a lease: the writes below are refused once that is lost.
PAUSES_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 4.0)


def write_patiently[Result](write: Callable[[], Result]) -> Result:
    """What `write` returns; it is tried again while the database is away, so it must be safe to repeat."""
    for pause in PAUSES_SECONDS:
        try:
            return write()
        except DatabaseError as error:
            logger.warning("the database is away; trying again", reason=type(error).__name__)
            connections.close_all()
            time.sleep(pause)
    return write()
