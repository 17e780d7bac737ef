"""Messages that were lost before any worker said that it had them: they are found missing, and sent again.

A Redis that comes back without its data has lost those that lay in a queue; a worker that is killed as it takes some
has lost those in its memory. Nothing else would notice before the requests' deadlines.
"""

import time
from collections.abc import Mapping

import structlog

from acsinfra.core.courier import Courier
from inference.bus.envelope import Posted, is_in_line, send_again
from inference.bus.replies import Inbox

logger = structlog.get_logger(__name__)

# A worker says within milliseconds that it has a message. What is sent again sooner might be on its way; later, a
# client waits longer for nothing.
LOST_AFTER_SECONDS = 5.0
# The watch has more to do, such as saying that this process lives: it comes back for the rest.
AT_ONCE = 200


async def send_lost_again(inboxes: Mapping[str, Inbox], *, courier: Courier, connected_at: float) -> None:
    """Send what has waited for a worker since long and isn't in its queue; `inboxes` in the order they came.

    Since `connected_at` (monotonic) Redis can be heard; what workers had to say before may take a moment more.
    Raises BrokerAway.
    """
    before = time.monotonic() - LOST_AFTER_SECONDS
    if connected_at > before:
        return
    waiting: dict[str, list[tuple[Inbox, Posted]]] = {}
    for inbox in inboxes.values():
        if inbox.is_in_line and inbox.posted is not None and inbox.published_at < before:
            waiting.setdefault(inbox.model, []).append((inbox, inbox.posted))
    for model, in_line in waiting.items():
        lost = await _lost_of(in_line[:AT_ONCE], courier)
        n_sent = 0
        # Each is put before those that are there, so the oldest comes last.
        for inbox, posted in reversed(lost):
            # It may have been taken or given up meanwhile. A cancel from here on comes behind it.
            if inbox.is_in_line and inboxes.get(inbox.request_id) is inbox:
                inbox.sendings += 1
                n_sent += await send_again(posted, sending=inbox.sendings, courier=courier)
                inbox.published_at = time.monotonic()
        if n_sent:
            logger.warning("requests were lost before a worker had them; they are sent again", model=model, n=n_sent)


async def _lost_of(in_line: list[tuple[Inbox, Posted]], courier: Courier) -> list[tuple[Inbox, Posted]]:
    """Those that aren't in their queue, of some in order: workers take the oldest first, so it is a first part."""
    for n_lost, (_, posted) in enumerate(in_line):
        if await is_in_line(posted, courier):
            return in_line[:n_lost]
    return in_line
