"""The Celery worker of an inference worker's process: it hears that there may be background work, and signals."""

import logging

import structlog
from celery import signals
from django.conf import settings

from acsinfra.celery import app
from inference.worker.background import kinds_of_background
from inference.worker.process import InferenceWorker
from inference.worker.registry import Registration

logger = structlog.get_logger(__name__)

# Celery writes a line for each task received and each one done; the API writes one for each request.
QUIET_LOGGERS = ("celery.worker.strategy", "celery.app.trace")


def run_celery_worker(worker: InferenceWorker, registration: Registration) -> None:
    """Take Completions, and look for background work when told so, until a SIGTERM or SIGINT; then begin nothing."""
    # Logging is set up already; a receiver of this signal keeps Celery from doing it again.
    signals.setup_logging.connect(_keep_logging, weak=False)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)

    def stop_taking(sender: object, **_: object) -> None:
        registration.leave()
        worker.stop_taking()

    def begin_taking(sender: object, **_: object) -> None:
        # By now it is Celery that hears the signals.
        worker.begin_taking()

    signals.worker_ready.connect(begin_taking, weak=False)
    signals.worker_shutting_down.connect(stop_taking, weak=False)
    # Reconnect for ever.
    app.conf.broker_connection_max_retries = None
    model = worker.model.name
    celery_worker = app.Worker(
        hostname=f"{registration.worker}@{registration.engine.host}",
        pool="solo",
        queues=[kind.queue(model) for kind in kinds_of_background()],
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
