"""The engine's end: a Celery worker with threads around `InferenceEngine`, of the model that PLAIN_WAY_MODEL names.

`celery -A tests.benchmarks.plain_way.worker worker -P threads -c 64 -Q plain_way`
"""

import asyncio
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import redis
import uvloop
from celery import Celery, signals

from tests.benchmarks.plain_way.names import ANSWERS, READY, TASK

if TYPE_CHECKING:
    from inference.engine.front import InferenceEngine

app = Celery("plain_way", broker=os.environ["BROKER_URL"])
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=1, worker_hijack_root_logger=False)
_broker = redis.Redis.from_url(os.environ["BROKER_URL"])
_loop = uvloop.new_event_loop()
_engines: list["InferenceEngine"] = []


@signals.worker_init.connect
def load(**_: Any) -> None:
    """Start the engine."""
    import django

    django.setup()
    from tests.benchmarks.direct_engine import load_options

    options = load_options(os.environ["PLAIN_WAY_MODEL"])
    from inference.engine.front import InferenceEngine

    threading.Thread(target=_loop.run_forever, daemon=True).start()
    starting = InferenceEngine.start(options, name="plain-way")
    _engines.append(asyncio.run_coroutine_threadsafe(starting, _loop).result())
    _broker.set(READY, 1)


@signals.worker_shutdown.connect
def unload(**_: Any) -> None:
    """End the engine."""
    asyncio.run_coroutine_threadsafe(_engines.pop().shutdown(), _loop).result()


@app.task(name=TASK)
def complete(name: str, prompt: list[int], max_tokens: int) -> None:
    """Have the engine answer, and tell."""
    answering = _engines[0].answer(_request(name, prompt, max_tokens))
    deltas, _ = asyncio.run_coroutine_threadsafe(answering, _loop).result()
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    _broker.xadd(ANSWERS, {"id": name, "token_ids": json.dumps(token_ids)}, maxlen=10_000)


def _request(name: str, prompt: list[int], max_tokens: int) -> Any:
    from inference.wire import EngineRequest, Sampling

    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
