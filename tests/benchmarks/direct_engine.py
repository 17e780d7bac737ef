"""An engine driven directly, in a process of its own: a line of JSON in (a DirectLoad), one out (an Outcome).

It is what an inference worker has, `InferenceEngine` on the options of the model's row, without all that is around it.
`python -m tests.benchmarks.direct_engine MODEL` says `{}` when the engine serves.
"""

import asyncio
import itertools
import os
import sys
import time
from typing import TYPE_CHECKING

import django
import msgspec
import uvloop

from inference.wire import EngineOptions, EngineRequest, Sampling
from tests.benchmarks.figures import Outcome

if TYPE_CHECKING:
    from inference.engine.front import InferenceEngine


class DirectLoad(msgspec.Struct, kw_only=True):
    """`requests` requests of `prompt` (token ids), `in_flight` at a time, to the lengths of `max_tokens` in turn."""

    prompt: list[int]
    max_tokens: list[int]
    in_flight: int
    requests: int


async def run_load(engine: "InferenceEngine", load: DirectLoad) -> Outcome:
    """Make the load."""
    ended_at: list[float] = []
    latencies: list[float] = []
    lengths = itertools.islice(itertools.cycle(load.max_tokens), load.requests)
    name = f"load-{time.monotonic_ns()}"

    async def client() -> None:
        for max_tokens in lengths:
            request = EngineRequest(
                request_id=f"{name}-{next(numbers)}",
                prompt_token_ids=tuple(load.prompt),
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
            sent_at = time.perf_counter()
            await engine.answer(request)
            now = time.perf_counter()
            ended_at.append(now - began)
            latencies.append(now - sent_at)

    numbers = itertools.count()
    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.in_flight):
            group.create_task(client())
    return Outcome(ended_at=ended_at, latencies=latencies, cpu_seconds=time.process_time() - cpu)


async def serve(options: EngineOptions) -> None:
    """Serve loads until standard input closes."""
    from inference.engine.front import InferenceEngine

    engine = await InferenceEngine.start(options, name="bench-direct")
    try:
        _say({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(await run_load(engine, msgspec.json.decode(line, type=DirectLoad)))
    finally:
        await engine.shutdown()


def _say(answer: object) -> None:
    print(msgspec.json.encode(answer).decode(), file=ANSWERS, flush=True)


def load_options(model_name: str) -> EngineOptions:
    """The options by which an inference worker loads the model, with this process's environment set for them."""
    from django.conf import settings

    from inference.engine.checkpoint import resolve_source
    from inference.engine.environment import prepare_environment
    from inference.models import BaseModel
    from inference.services import engine_options

    model = BaseModel.objects.get(name=model_name)
    checkpoint = str(resolve_source(model.source, cache_dir=settings.MODELS_CACHE, revision=model.revision or None))
    prepare_environment(checkpoint=checkpoint, tensor_parallel_size=model.tensor_parallel_size, shares_machine=True)
    return engine_options(model=model, checkpoint=checkpoint)


if __name__ == "__main__":
    # What else is printed here is no answer.
    ANSWERS, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    django.setup()
    uvloop.run(serve(load_options(sys.argv[1])))
