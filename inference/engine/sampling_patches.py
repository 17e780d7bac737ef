"""Two things that vLLM 0.32's Runner V1 cannot do, done around it in the worker."""

from typing import Any, Self

import torch
from vllm.v1.outputs import LogprobsTensors

from inference.engine.residual_stream import ResidualStream


def add_extra_logprobs(runner: Any, stream: ResidualStream) -> None:
    """Let a request have the logprobs of tokens of its choice beside the likeliest ones.

    vLLM's own `logprob_token_ids` takes the place of the likeliest tokens, and in Runner V1 in every other request of
    the batch too. Such a request asks for as many more logprobs as it names tokens; here their columns, behind those
    of its likeliest, are filled.
    """
    sampler = runner.sampler
    gather, sample = sampler.gather_logprobs, sampler.forward
    is_sampling = False

    def sample_and_say_so(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_sampling
        is_sampling = True
        try:
            return sample(*args, **kwargs)
        finally:
            is_sampling = False

    def gather_with_extra(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        gathered = gather(logprobs, num_logprobs, token_ids=token_ids)
        if not is_sampling:
            return gathered  # the rows of a prompt, which are not the batch's requests
        for row, request_id in enumerate(runner.input_batch.req_ids):
            options = stream.options_of(request_id)
            if options is None or not options.logprob_token_ids:
                continue
            columns = slice(1 + options.top_logprobs, 1 + options.top_logprobs + len(options.logprob_token_ids))
            ids = torch.tensor(options.logprob_token_ids, device=logprobs.device)
            gathered.logprob_token_ids[row, columns] = ids.to(gathered.logprob_token_ids.dtype)
            gathered.logprobs[row, columns] = logprobs[row, ids]
        return gathered

    sampler.forward, sampler.gather_logprobs = sample_and_say_so, gather_with_extra


class RewindingGenerator(torch.Generator):
    """A CPU generator whose last draw can be undone.

    After sampling for a prompt that is not read to its end yet, Runner V1 takes the draw back with
    `set_offset(get_offset() - 4)`, which CPU generators answer by an error that ends the engine.
    """

    _before_draw: torch.Tensor | None = None

    def keep_state(self) -> Self:
        """Remember the state that `set_offset` goes back to."""
        self._before_draw = self.get_state()
        return self

    def get_offset(self) -> int:
        """Return a number; only the call of `set_offset` that follows counts."""
        return 0

    def set_offset(self, _offset: int) -> torch.Generator:
        """Go back to the state kept last."""
        if self._before_draw is not None:
            self.set_state(self._before_draw)
        return self


def rewind_seeded_generators(runner: Any) -> None:
    """Give seeded requests generators that survive a chunked prompt."""
    prepare_inputs = runner._prepare_inputs

    def prepare_with_kept_states(scheduler_output: Any, counts: Any) -> Any:
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, RewindingGenerator):
                rewinding = RewindingGenerator()
                rewinding.set_state(generator.get_state())
                request = runner.requests[batch.req_ids[row]]
                batch.generators[row] = request.generator = rewinding
                generator = rewinding
            request = runner.requests[batch.req_ids[row]]
            if batch.num_computed_tokens_cpu[row] + counts[row] < request.num_tokens:
                generator.keep_state()
        return prepare_inputs(scheduler_output, counts)

    runner._prepare_inputs = prepare_with_kept_states
