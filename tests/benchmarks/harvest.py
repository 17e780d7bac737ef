"""How fast a harvest is beside plain prefill: the same engine, prompts and layers, taking turns in one process."""

import itertools
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import CommandError

from accounts.models import User
from accounts.services import create_user
from acsinfra.core.leases import claim_next
from acsinfra.core.storage import storage_from_url
from harvest.models import HarvestJob
from harvest.services import HarvestPlan, submit_harvest
from inference.models import BaseModel, CheckpointFiles
from inference.services import engine_options

if TYPE_CHECKING:
    from inference.engine.harvest import HarvestEngine

TEXTS = Path(settings.BASE_DIR) / "acsinfra" / "quickstart" / "texts.txt"
WINDOW_TOKENS = 8_192


def measure(*, model_name: str, n_prompts: int, rounds: int, layers: Sequence[int] | None) -> dict[str, Any]:
    """Return tokens/s of plain prefill, of the capture alone and of whole jobs into a folder: medians and ratios.

    Each round runs the three, one after the other. Makes a User and a Base model of its own, and deletes them.
    """
    model = BaseModel.objects.select_related("files").filter(name=model_name).first()
    if model is None:
        raise CommandError(f"There is no Base model {model_name!r}.")
    engine = _load(model)
    from inference.engine.harvest import HarvestEngine

    assert isinstance(engine, HarvestEngine)
    user = create_user(username=f"bench-{uuid.uuid4().hex[:8]}", email=f"{uuid.uuid4().hex}@example.org", password=None)
    own = _copy_of(model)
    prompts = _prompts(n_prompts)
    chosen = sorted({model.n_layers // 4, model.n_layers // 2, 3 * model.n_layers // 4} if layers is None else layers)
    token_ids = _tokenise(model, prompts)
    n_tokens = sum(map(len, token_ids))
    ways: dict[str, Callable[[], object]] = {
        "prefill": lambda: _prefill(engine, token_ids),
        "capture": lambda: sum(1 for _ in engine.capture(enumerate(token_ids), chosen, window_tokens=WINDOW_TOKENS)),
        "end_to_end": lambda: _run_job(engine, user=user, model=own, prompts=prompts, layers=chosen),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(rounds + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - started)
    finally:
        own.delete()
        user.delete()
        engine.shutdown()
    medians = {name: n_tokens / statistics.median(of) for name, of in seconds.items()}
    per_round = {
        f"{name}_over_prefill": statistics.median(
            plain / other for plain, other in zip(seconds["prefill"], seconds[name], strict=True)
        )
        for name in ("capture", "end_to_end")
    }
    return {
        "model": model_name,
        "prompts": n_prompts,
        "tokens": n_tokens,
        "layers": chosen,
        "rounds": rounds,
        "tokens_per_s": {name: round(value) for name, value in medians.items()},
        "ratios": {name: round(value, 3) for name, value in per_round.items()},
    }


def _load(model: BaseModel) -> "HarvestEngine":
    from inference.engine.checkpoint import resolve_source
    from inference.engine.environment import prepare_environment

    checkpoint = str(resolve_source(model.source, cache_dir=settings.MODELS_CACHE, revision=model.revision or None))
    prepare_environment(checkpoint=checkpoint, tensor_parallel_size=model.tensor_parallel_size, shares_machine=False)
    from inference.engine.harvest import HarvestEngine

    return HarvestEngine.start(engine_options(model=model, checkpoint=checkpoint), name="bench-harvest")


def _copy_of(model: BaseModel) -> BaseModel:
    """A Base model of this benchmark's own, so that no runner takes its jobs."""
    files = model.files
    copy = BaseModel.objects.get(pk=model.pk)
    copy.pk = None
    copy.name = f"bench-{uuid.uuid4().hex[:8]}"
    copy.save(force_insert=True)
    CheckpointFiles.objects.create(
        base_model=copy, config=files.config, tokenizer_zstd=files.tokenizer_zstd, sha256=files.sha256
    )
    return BaseModel.objects.select_related("files").get(pk=copy.pk)


def _prompts(count: int) -> list[str]:
    texts = [text.strip() for text in TEXTS.read_text().split("\n\n") if text.strip()]
    # Ragged on purpose: whole texts and their beginnings.
    return [text[: len(text) * (1 + i % 4) // 4] for i, text in zip(range(count), itertools.cycle(texts), strict=False)]


def _tokenise(model: BaseModel, prompts: list[str]) -> list[list[int]]:
    from harvest.runner.corpus import load_tokenizer, tokenise

    tokenised = tokenise(
        prompts,
        tokenizer=load_tokenizer(bytes(model.files.tokenizer_zstd)),
        add_special_tokens=True,
        tokens_at_most=model.effective_max_model_len - 1,
    )
    return [prompt.token_ids.tolist() for prompt in tokenised]


def _prefill(engine: "HarvestEngine", token_ids: Sequence[Sequence[int]]) -> None:
    """Read the prompts without capture, as many in flight as a harvest has, past the prefix cache as a harvest is."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    llm, tokens_in_flight, in_flight = engine._llm, 0, {}
    waiting = iter(enumerate(token_ids))
    run = uuid.uuid4().hex
    while True:
        while tokens_in_flight < WINDOW_TOKENS and (following := next(waiting, None)) is not None:
            name = f"{run}-{following[0]}"
            prompt = TokensPrompt(prompt_token_ids=list(following[1]), cache_salt=name)
            llm.add_request(name, prompt, SamplingParams(max_tokens=1, temperature=0, detokenize=False))
            in_flight[name] = len(following[1])
            tokens_in_flight += len(following[1])
        if not in_flight:
            return
        for output in llm.step():
            if output.finished:
                tokens_in_flight -= in_flight.pop(output.request_id)


def _run_job(
    engine: "HarvestEngine", *, user: User, model: BaseModel, prompts: list[str], layers: Sequence[int]
) -> None:
    """Submit a job, claim it and run it to its manifest, as a runner does, into a temporary folder."""
    from harvest.runner.lease_keeper import LeaseKeeper
    from harvest.runner.run import HarvestRun
    from harvest.runner.stopwatch import Stopwatch

    plan = HarvestPlan(
        base_model_id=model.pk,
        model=model.name,
        prompts=prompts,
        layers=tuple(layers),
        shard_size=32,
        batch_size=None,
        add_special_tokens=True,
        directions=None,
        reserved_tokens=sum(len(prompt.encode()) + 1 for prompt in prompts),
        bytes_at_most=0,
    )
    submit_harvest(user=user, api_key=None, plan=plan)
    owner = uuid.uuid4()
    job = claim_next(HarvestJob, base_model_id=model.pk, owner=owner, lease=settings.LEASE)
    assert job is not None
    keeper = LeaseKeeper(job_id=job.pk, owner=owner, is_stopping=lambda: False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            HarvestRun(
                job=job,
                owner=owner,
                model=model,
                storage=storage_from_url(Path(folder).as_uri()),
                get_engine=lambda: engine,
                keeper=keeper,
                watch=Stopwatch(),
            ).run()
    finally:
        keeper.end()
