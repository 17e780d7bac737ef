"""A whole Completion in the engine: its prompts side by side, and one JSON body of all they got."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING

from inference.answers import AnswerBuilder, engine_requests
from inference.engine.activations import CapturedActivations
from inference.wire import CompletionWork, EngineDelta, EngineRequest
from inference.worker.activations import activations_json, check_capture

if TYPE_CHECKING:
    from inference.engine.front import InferenceEngine

# Answers with more log probabilities than this are encoded in a thread.
ENCODE_HERE_ENTRIES = 2000

# Takes in what the prompt of this number got.
type Gain = Callable[[int, EngineDelta | CapturedActivations], Awaitable[None]]
# What a prompt is in while the engine has it: entering it waits for a place.
type Place = Callable[[EngineRequest], AbstractAsyncContextManager[object]]


def at_most(prompts: int) -> Place:
    """Places for so many prompts of one request side by side."""
    places = asyncio.Semaphore(prompts)
    return lambda request: places


async def make_whole_answer(
    work: CompletionWork, engine: "InferenceEngine", builder: AnswerBuilder, *, place: Place
) -> bytes:
    """The answer to `work` as JSON; `builder` (made for it) counts the tokens on the way.

    Raises as `InferenceEngine.generate` does, and MisbehavedEngine. Cancelling it stops the engine's requests.
    """
    captured: list[CapturedActivations] = []

    async def gain(prompt: int, item: EngineDelta | CapturedActivations) -> None:
        if isinstance(item, EngineDelta):
            builder.add(prompt, item)
        else:
            captured.append(item)

    await generate(engine, engine_requests(work), gain, place=place)
    activations = None
    if work.capture_layers:
        # An engine generates a token even where the answer has none; it never goes through the model.
        tokens = work.prompt_tokens + max(1, builder.completion_tokens) - 1
        capture = check_capture(captured, layers=work.capture_layers, tokens=tokens, hidden=engine.facts.hidden_size)
        activations = await asyncio.to_thread(activations_json, capture)
    if builder.logprob_entries > ENCODE_HERE_ENTRIES or activations is not None:
        return await asyncio.to_thread(builder.body, activations)
    return builder.body()


async def generate(engine: "InferenceEngine", requests: Sequence[EngineRequest], gain: Gain, *, place: Place) -> None:
    """Run `requests` side by side, each in its `place`, and give `gain` what each gets, with its number."""

    async def run(number: int, request: EngineRequest) -> None:
        async with place(request):
            await _run_one(engine, number, request, gain)

    if len(requests) == 1:
        await run(0, requests[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                group.create_task(run(number, request))
    except BaseExceptionGroup as errors:
        # The first that failed; the others were stopped because of it.
        raise errors.exceptions[0] from None


async def _run_one(engine: "InferenceEngine", number: int, request: EngineRequest, gain: Gain) -> None:
    async with aclosing(engine.generate(request)) as items:
        async for item in items:
            await gain(number, item)
