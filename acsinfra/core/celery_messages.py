"""The very message that Celery would send, for who must not wait for Celery's blocking client.

`apply_async` blocks the event loop for a third of a millisecond; this is one command among the courier's. A test
holds the format against `apply_async` itself.
"""

import base64
import uuid

import msgspec

_json = msgspec.json.Encoder()


def celery_message(*, task: str, queue: str, kwargs: dict[str, object]) -> bytes:
    """The message by which Celery (5.7, protocol 2, kombu's Redis transport) runs `task` with `kwargs` from `queue`."""
    task_id = str(uuid.uuid4())
    body = _json.encode([[], kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return _json.encode(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {
                "lang": "py",
                "task": task,
                "id": task_id,
                "shadow": None,
                "eta": None,
                "expires": None,
                "group": None,
                "group_index": None,
                "retries": 0,
                "timelimit": [None, None],
                "root_id": task_id,
                "parent_id": None,
                # Celery logs these where it logs arguments; prompts never appear in a log.
                "argsrepr": "()",
                "kwargsrepr": "{}",
                "origin": "api",
                "ignore_result": True,
                "replaced_task_nesting": 0,
                "stamped_headers": None,
                "stamps": {},
            },
            "properties": {
                "correlation_id": task_id,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": task_id,
            },
        }
    )
