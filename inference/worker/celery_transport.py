"""Celery's Redis transport as an inference worker needs it: what is reserved is remembered here, not in Redis.

kombu (5.7) keeps a copy of each reserved message in Redis, by which it gives the message out again when nobody has
acknowledged it for the visibility timeout, a day here. A Completion has a deadline of minutes, and its API process
sees by itself that a worker died, or sends again what no worker says it has; a message that only says "look" is worth
nothing by then. For that the worker would wait for two transactions a message, each through a Redis client made for
it: a third of its CPU. What a worker that stops has not begun goes back to the queue as before.
"""

from typing import Any

from kombu.transport import redis, virtual

from inference.bus.envelope import encode_message


class _QoS(redis.QoS):
    """The reserved messages that are not acknowledged, in memory."""

    def append(self, message: Any, delivery_tag: str) -> None:
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self._put_back([self.get(delivery_tag)])
        virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Put back what was reserved and not begun, the oldest to be taken first."""
        books: Any = self  # more than kombu's type stubs know
        books._flush()
        self._put_back(list(books._delivered.values()))
        books._delivered.clear()

    def restore_visible(self, *args: Any, **options: Any) -> None:
        """Nothing of ours is in Redis."""

    def _put_back(self, messages: list[Any]) -> None:
        if not messages:
            return
        channel: Any = self.channel
        with channel.conn_or_acquire() as client, client.pipeline() as pipe:
            for message in reversed(messages):
                # To the byte as it was: an API process looks for its message, and sends one again that isn't there.
                # (kombu's own way marks it as redelivered.)
                payload, where = message._raw, message.delivery_info
                priority = channel._get_message_priority(payload, reverse=False)
                for queue in channel._lookup(where["exchange"], where["routing_key"]):
                    pipe.rpush(channel._q_for_pri(queue, priority), encode_message(payload))
            pipe.execute()


class _Channel(redis.Channel):
    QoS = _QoS


def reserve_in_memory() -> None:
    """Make it so for this process; call it before its Celery worker starts."""
    redis.Transport.Channel = _Channel
