"""A runner's engine and the runner's own way of a job, in a process of their own: a line of JSON in, one out.

`python -m tests.benchmarks.harvest_engine SOURCE DTYPE PROMPTS KIND TOKENS_FILE` says what it loaded, having written
the token ids of all prompts to TOKENS_FILE. KIND is `eager`, `compiled`, or `plain`: eager with vLLM's own products.
Then it answers each `{"way": …, "layers": […]}` with the seconds that the way took and the most memory that it had
meanwhile; `"prompts": n` takes the first n alone, `"storage": url` is where the files of `end_to_end` go.
"""

import json
import math
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import django
import numpy as np
from django.conf import settings

if TYPE_CHECKING:
    from accounts.models import User

WINDOW_TOKENS = 8_192
MEMORY_BYTES = 256 * 1024 * 1024


class EngineWays:
    """The engine of one Base model, with a User of its own, in the database that the settings name."""

    def __init__(self, *, source: str, dtype: str, n_prompts: int, kind: str) -> None:
        from accounts.services import create_user
        from harvest.runner.windows import WindowMemory
        from inference.engine.checkpoint import resolve_source
        from inference.engine.environment import prepare_environment
        from inference.models import BaseModel
        from inference.services import add_model, engine_options
        from tests.benchmarks.harvest_prompts import make_prompts

        name = f"bench-{uuid.uuid4().hex[:8]}"
        add_model(name=name, source=source, dtype=dtype)
        self.model: BaseModel = BaseModel.objects.select_related("files").get(name=name)
        self.user: User = create_user(username=name, email=f"{name}@example.org", password=None)
        self.prompts = make_prompts(n_prompts)
        self.storage_url: str | None = None
        self.token_ids = self._tokenise()
        self.checkpoint = str(resolve_source(source, cache_dir=settings.MODELS_CACHE))
        prepare_environment(
            checkpoint=self.checkpoint,
            tensor_parallel_size=1,
            shares_machine=False,
            compile_cache=settings.ENGINE_CACHE,
        )
        began = time.perf_counter()
        from inference.engine.harvest import HarvestEngine

        self.import_s = time.perf_counter() - began
        began = time.perf_counter()
        if kind == "plain":
            _leave_products_to_vllm()
        options = engine_options(model=self.model, checkpoint=self.checkpoint)
        self.engine: HarvestEngine = HarvestEngine.start(options, name=name, is_compiled=kind == "compiled")
        self.load_s = time.perf_counter() - began
        self.multiplies_in_float32 = _multiplies_in_float32(self.engine.facts.dtype)
        self.memory = WindowMemory(MEMORY_BYTES)
        self.values = np.empty(MEMORY_BYTES, np.uint8)

    def facts(self) -> dict[str, Any]:
        """What was loaded."""
        return {
            "checkpoint": self.checkpoint,
            "served_model_name": self.model.served_model_name,
            "dtype": self.engine.facts.dtype,
            "multiplies_in_float32": self.multiplies_in_float32,
            "n_layers": self.engine.facts.n_layers,
            "tokens": sum(map(len, self.token_ids)),
            "import_s": round(self.import_s, 1),
            "load_s": round(self.load_s, 1),
        }

    def take(self, way: str, layers: Sequence[int], n_prompts: int | None = None) -> dict[str, Any]:
        """Go one way once; returns its seconds and the peak of resident bytes, and what a job says of its own."""
        every = self.prompts, self.token_ids
        self.prompts, self.token_ids = self.prompts[:n_prompts], self.token_ids[:n_prompts]
        # The peak is since now.
        Path("/proc/self/clear_refs").write_text("5")
        if way == "end_to_end":
            self._submit(layers)  # the API's part
        self.folder = tempfile.mkdtemp(prefix="files-", dir=settings.HOME)
        began, cpu = time.perf_counter(), time.process_time()
        try:
            timings = getattr(self, f"_{way}")(layers)
        finally:
            self.prompts, self.token_ids = every
        # Deleting the files is no part of it.
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        shutil.rmtree(self.folder)
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "timings": timings, "peak_bytes": _peak_bytes()}

    def _prefill(self, _layers: Sequence[int]) -> None:
        """Read the prompts without capture, as many in flight as a harvest has, past the prefix cache as a harvest is.

        The longest of each window first, as a run has them.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        llm, tokens_in_flight, in_flight = self.engine._llm, 0, {}
        waiting = iter(enumerate(sorted(self.token_ids, key=len, reverse=True)))
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

    def _capture(self, layers: Sequence[int]) -> None:
        """The engine's capture into memory that is used again, as a run's is; no files, no statistics."""
        from inference.engine.activations import ARRAY_DTYPES

        facts = self.engine.facts
        dtype = ARRAY_DTYPES[facts.dtype]
        by_length = sorted(enumerate(self.token_ids), key=lambda prompt: -len(prompt[1]))
        used = 0

        def place(index: int) -> Any:
            nonlocal used
            shape = len(layers), len(self.token_ids[index]), facts.hidden_size
            nbytes = math.prod(shape) * dtype.itemsize
            if used + nbytes > len(self.values):
                used = 0
            part = self.values[used : used + nbytes].view(dtype).reshape(shape)
            used += nbytes
            return part

        read = self.engine.capture(by_length, layers, place=place, window_tokens=WINDOW_TOKENS)
        assert sum(1 for _ in read) == len(self.token_ids)

    def _submit(self, layers: Sequence[int]) -> None:
        from harvest.services import HarvestPlan, submit_harvest

        plan = HarvestPlan(
            base_model_id=self.model.pk,
            model=self.model.name,
            prompts=self.prompts,
            layers=tuple(layers),
            shard_size=32,
            batch_size=None,
            add_special_tokens=True,
            directions=None,
            reserved_tokens=sum(len(prompt.encode()) + 1 for prompt in self.prompts),
            bytes_at_most=0,
        )
        submit_harvest(user=self.user, api_key=None, plan=plan)

    def _end_to_end(self, _layers: Sequence[int]) -> Any:
        """Claim the submitted job and run it to its manifest, as a runner does, into a temporary folder."""
        from acsinfra.core.leases import claim_next
        from acsinfra.core.storage import storage_from_url
        from harvest.models import PROMPTS_AT_MOST, HarvestJob
        from harvest.runner.lease_keeper import LeaseKeeper
        from harvest.runner.lives import PromptsInFlight
        from harvest.runner.run import HarvestRun
        from harvest.runner.stopwatch import Stopwatch

        owner = uuid.uuid4()
        job_id = claim_next(HarvestJob, base_model_id=self.model.pk, owner=owner, lease=settings.LEASE)
        assert job_id is not None
        job = HarvestJob.objects.get(pk=job_id)
        keeper = LeaseKeeper(job_id=job.pk, owner=owner, is_stopping=lambda: False)
        try:
            done = HarvestRun(
                job=job,
                owner=owner,
                model=self.model,
                storage=storage_from_url(self.storage_url or Path(self.folder).as_uri()),
                get_engine=lambda _tokens: self.engine,
                keeper=keeper,
                watch=Stopwatch(),
                memory=self.memory,
                in_flight=PromptsInFlight(PROMPTS_AT_MOST),
            ).run()
        finally:
            keeper.end()
        return (done.result or {}).get("timings")

    def _tokenise(self) -> list[list[int]]:
        from harvest.runner.corpus import load_tokenizer, tokenise

        tokenised = tokenise(
            self.prompts,
            tokenizer=load_tokenizer(bytes(self.model.files.tokenizer_zstd)),
            add_special_tokens=True,
            tokens_at_most=self.model.effective_max_model_len - 1,
        )
        return [prompt.token_ids.tolist() for prompt in tokenised]


def _leave_products_to_vllm() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from inference.engine import float32_products

        patch.object(float32_products, "is_slow", return_value=False).start()


def _multiplies_in_float32(dtype: str) -> bool:
    """Whether the engine's products are not vLLM's own."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from inference.engine import float32_products

    return float32_products.is_slow(getattr(torch, dtype))


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    """Answer until standard input closes."""
    # What else is printed here is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    source, dtype, n_prompts, kind, tokens_file = sys.argv[1:]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    django.setup()
    ways = EngineWays(source=source, dtype=dtype, n_prompts=int(n_prompts), kind=kind)
    Path(tokens_file).write_text(json.dumps(ways.token_ids))
    print(json.dumps(ways.facts()), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ways.storage_url = asked.get("storage")
        print(json.dumps(ways.take(asked["way"], asked["layers"], asked.get("prompts"))), file=answers, flush=True)
    ways.engine.shutdown()


if __name__ == "__main__":
    main()
