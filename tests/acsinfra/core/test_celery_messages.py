"""The message that says "look", held against Celery's own."""

import base64
import json
from typing import Any

import redis
from celery import Celery
from django.conf import settings

from acsinfra.core.celery_messages import celery_message

TASK = QUEUE = "compared"


def test_the_message_is_what_celery_itself_would_send() -> None:
    app = Celery("here", broker=settings.BROKER_URL)
    app.conf.update(task_ignore_result=True)

    @app.task(name=TASK, shared=False)
    def compared(*, number: int) -> None:
        raise AssertionError("never run here")

    kwargs: dict[str, object] = {"number": 1}
    compared.apply_async(kwargs=kwargs, queue=QUEUE)
    with redis.Redis.from_url(settings.BROKER_URL) as client:
        theirs: dict[str, Any] = json.loads(client.rpop(QUEUE) or b"")
        assert client.llen(QUEUE) == 0
    ours: dict[str, Any] = json.loads(celery_message(task=TASK, queue=QUEUE, kwargs=kwargs))
    volatile = {"id", "root_id", "correlation_id", "delivery_tag", "reply_to", "origin", "argsrepr", "kwargsrepr"}
    for part in ("headers", "properties"):
        assert {name: value for name, value in ours[part].items() if name not in volatile} == {
            name: value for name, value in theirs[part].items() if name not in volatile
        }
        assert ours[part].keys() == theirs[part].keys()
    assert {name: ours[name] for name in ours if name not in ("headers", "properties", "body")} == {
        name: theirs[name] for name in theirs if name not in ("headers", "properties", "body")
    }
    assert json.loads(base64.b64decode(ours["body"])) == json.loads(base64.b64decode(theirs["body"]))
