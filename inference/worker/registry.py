"""How an inference worker stands in the registry: its Engine row, its key in Redis, and a thread that renews both."""

import queue
import threading
import time
from collections.abc import Callable

import structlog
from django.conf import settings
from django.db import DatabaseError, connections
from redis import Redis
from redis.exceptions import RedisError

from inference import services
from inference.bus import keys
from inference.models import BaseModel, Engine

logger = structlog.get_logger(__name__)


class Registration:
    """The registration of this process's engine, from `starting` until it leaves.

    The row says whether new requests may come; the key in Redis says that those taken are still worked on, and so
    stays until the very end. All of the database's work happens in one thread, and none of it stops the worker.
    """

    def __init__(self, *, model: BaseModel, on_removed: Callable[[], None]) -> None:
        self.engine = services.register_engine(model=model, kind=Engine.Kind.INFERENCE)
        self.worker = str(self.engine.pk)
        self._on_removed = on_removed
        self._redis = Redis.from_url(settings.BROKER_URL, socket_timeout=5, socket_connect_timeout=3)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_listed = True
        self._renew_key()
        # The main thread asks the database nothing more.
        connections.close_all()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    def mark_live(self) -> None:
        """The engine serves from now on."""
        self._orders.put(lambda: services.mark_live(engine=self.engine))

    def mark_starting(self) -> None:
        """The engine died and loads again."""
        self._orders.put(lambda: services.mark_starting(engine=self.engine))

    def leave(self) -> None:
        """Take no more requests; what was taken goes on."""
        self._orders.put(self._take_row_away)

    def close(self, *, within: float = 10.0) -> None:
        """Leave for good: the row and the key go."""
        self.leave()
        self._orders.put(None)
        self._thread.join(timeout=within)

    def _run(self) -> None:
        beats_every = settings.HEARTBEAT.total_seconds()
        next_beat = time.monotonic() + beats_every
        while True:
            try:
                order = self._orders.get(timeout=max(0.0, next_beat - time.monotonic()))
            except queue.Empty:
                self._beat()
                next_beat = time.monotonic() + beats_every
                continue
            if order is None:
                break
            while not self._carry_out(order):
                time.sleep(min(1.0, beats_every))
                self._renew_key()
        try:
            self._redis.delete(keys.worker(self.worker))
        except RedisError as error:
            logger.warning("The worker's key could not be taken away; it expires.", error=str(error))

    def _beat(self) -> None:
        self._renew_key()
        if self._is_listed:
            self._carry_out(self._renew_row)

    def _renew_key(self) -> None:
        try:
            self._redis.set(keys.worker(self.worker), "1", px=settings.ENGINE_SILENT_AFTER)
        except RedisError as error:
            logger.warning("The worker's key could not be renewed.", error=str(error))

    def _renew_row(self) -> None:
        if not services.heartbeat(engine=self.engine):
            self._on_removed()

    def _take_row_away(self) -> None:
        self._is_listed = False
        services.leave_engine(engine=self.engine)

    def _carry_out(self, order: Callable[[], None]) -> bool:
        try:
            order()
        except DatabaseError as error:
            logger.warning("The database is away; the registration waits for it.", error=str(error))
            return False
        except Exception:
            # The heartbeats must go on.
            logger.exception("The registration could not be changed.")
        finally:
            connections.close_all()
        return True
