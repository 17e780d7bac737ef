"""The Celery worker of an inference worker's process: a pool of threads that each wait for one Completion."""

import logging
import threading
from typing import Any

import structlog
from celery import signals
from django.conf import settings

from acsinfra.celery import app
from inference.bus import keys
from inference.bus.envelope import TASK
from inference.worker.background import kinds_of_background
from inference.worker.celery_transport import reserve_in_memory
from inference.worker.process import InferenceWorker
from inference.worker.registry import Registration

logger = structlog.get_logger(__name__)

# Celery writes a line for each task received and each one done; the API writes one for each request.
QUIET_LOGGERS = ("celery.worker.strategy", "celery.app.trace")


def requests_at_once(sequences: int) -> int:
    """How many Completions an engine of so many sequences is given: some wait in it.

    A sequence that ends is followed in the engine's next step only by one that is there already. Those that end in one
    step are a sixteenth where answers have 16 tokens, and half where they have two.
    """
    return sequences + max(1, sequences // 2)


def run_celery_worker(worker: InferenceWorker, registration: Registration) -> None:
    """Take Completions of the worker's model until a SIGTERM or SIGINT, then finish what runs and return.

    What runs has `settings.ENGINE_TIME_LIMIT` to end; past that it is aborted.
    """
    # Logging is set up already; a receiver of this signal keeps Celery from doing it again.
    signals.setup_logging.connect(_keep_logging, weak=False)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)

    def announce(sender: object, request: Any, **_: object) -> None:
        if request.name == TASK:
            worker.announce(request.kwargs["envelope"])

    def stop_taking(sender: object, **_: object) -> None:
        registration.leave()
        worker.stop_taking()
        aborter = threading.Timer(settings.ENGINE_TIME_LIMIT.total_seconds(), worker.abort_all)
        aborter.daemon = True
        aborter.start()

    signals.task_received.connect(announce, weak=False)
    signals.worker_shutting_down.connect(stop_taking, weak=False)
    # Reconnect for ever, with the full prefetch: a broker that was away must not leave a slower worker behind.
    app.conf.broker_connection_max_retries = None
    app.conf.worker_enable_prefetch_count_reduction = False
    reserve_in_memory()
    model = worker.model.name
    celery_worker = app.Worker(
        hostname=f"{registration.worker}@{registration.engine.host}",
        pool="threads",
        concurrency=requests_at_once(worker.model.max_num_seqs),
        queues=[keys.queue(model), *(kind.queue(model) for kind in kinds_of_background())],
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,
        quiet=True,
        redirect_stdouts=False,
        loglevel=settings.LOG_LEVEL,
    )
    logger.info("The engine is live.", model=model, worker=registration.worker)
    celery_worker.start()


def _keep_logging(**_: object) -> None:
    """Receive `setup_logging` and leave all as it is."""
