"""`manage.py bench_completions MODEL`: what the API adds to the engine, for one client and one token."""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from inference.models import BaseModel
from inference.services import engine_options
from inference.wire import EngineRequest, Sampling

PROMPT_TOKEN_IDS = (5, 6, 7, 8, 9, 10, 11, 12)
WARM_UP = 30


class Command(BaseCommand):
    """Measure one-token Completions through the API, and beside them the same engine called directly."""

    help = "Latency of one-token Completions through a running API, or of the engine alone (--engine)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", help="the name of a Base model")
        parser.add_argument("--requests", type=int, default=500)
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        way = parser.add_mutually_exclusive_group(required=True)
        way.add_argument("--url", help="a running API, such as http://127.0.0.1:8000")
        way.add_argument("--engine", action="store_true", help="load the engine in this process and call it directly")
        parser.add_argument("--key", help="an API key, for --url")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["engine"]:
            seconds = asyncio.run(_time_engine(options["model"], options["requests"]))
        elif options["key"]:
            seconds = _time_api(options["url"], options["key"], options["model"], options["requests"])
        else:
            raise CommandError("--url needs --key.")
        figures = {"way": "engine" if options["engine"] else "api", "requests": len(seconds), **_figures(seconds)}
        if options["json"]:
            self.stdout.write(json.dumps(figures))
        else:
            self.stdout.write(", ".join(f"{name} {value}" for name, value in figures.items()))


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


def _time_api(url: str, key: str, model: str, requests: int) -> list[float]:
    body = {"model": model, "prompt": PROMPT_TOKEN_IDS, "max_tokens": 1, "temperature": 0}
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:

        def ask() -> None:
            client.post(f"{url.rstrip('/')}/v1/completions", json=body).raise_for_status()

        return _times(ask, requests)


def _times(ask: Callable[[], None], requests: int) -> list[float]:
    seconds = []
    for number in range(WARM_UP + requests):
        started = time.perf_counter()
        ask()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return seconds


async def _time_engine(model_name: str, requests: int) -> list[float]:
    from inference.engine.checkpoint import resolve_source
    from inference.engine.environment import prepare_environment

    model = await BaseModel.objects.filter(name=model_name).afirst()
    if model is None:
        raise CommandError(f"There is no Base model {model_name!r}.")
    checkpoint = str(resolve_source(model.source, cache_dir=settings.MODELS_CACHE, revision=model.revision or None))
    prepare_environment(checkpoint=checkpoint, tensor_parallel_size=model.tensor_parallel_size, shares_machine=True)
    from inference.engine.front import InferenceEngine

    engine = await InferenceEngine.start(engine_options(model=model, checkpoint=checkpoint), name="bench")
    sampling = Sampling(max_tokens=1, temperature=0.0)
    seconds = []
    try:
        for number in range(WARM_UP + requests):
            request = EngineRequest(request_id=f"bench-{number}", prompt_token_ids=PROMPT_TOKEN_IDS, sampling=sampling)
            started = time.perf_counter()
            await engine.answer(request)
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - started)
    finally:
        await engine.shutdown()
    return seconds
