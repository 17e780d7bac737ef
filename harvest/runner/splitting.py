"""Finding the one prompt that makes the engine fail, among those that it held when it did."""

from collections.abc import Callable, Sequence

from harvest.models import HarvestJob
from harvest.runner.corpus import tokenise_corpus
from inference.engine.trial import TrialEngine
from inference.models import BaseModel
from inference.wire import EngineOptions


def try_prompts(
    job: HarvestJob,
    model: BaseModel,
    options: EngineOptions,
    *,
    suspects: Sequence[int],
    name: str,
    should_stop: Callable[[], bool],
) -> int | None:
    """The one of the prompts `suspects` of a job that ends an engine of `options` alone; None when no single one does.

    Raises EngineRefused and TrialStopped.
    """
    prompts = tokenise_corpus(job, model)
    with TrialEngine(options, name=name, layers=job.layers, should_stop=should_stop) as trial:
        return find_failing_prompt(
            suspects,
            lambda indexes: trial.can_read([(index, prompts[index].token_ids.tolist()) for index in indexes]),
        )


def find_failing_prompt(suspects: Sequence[int], can_read: Callable[[Sequence[int]], bool]) -> int | None:
    """The one of `suspects` with which the engine fails alone; None when it is no single one.

    `can_read` says whether the engine survives some of them, read together: it is asked 2 log2(n) times at most.
    """
    found = list(suspects)
    is_alone = False
    while len(found) > 1:
        half = len(found) // 2
        failing = next((part for part in (found[:half], found[half:]) if not can_read(part)), None)
        if failing is None:
            return None
        found, is_alone = failing, True
    if not found:
        return None
    return found[0] if is_alone or not can_read(found) else None
