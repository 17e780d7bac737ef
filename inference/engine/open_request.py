"""One request between a front and vLLM: its parameters, its row file, and what may be released of its outputs."""

import uuid
from dataclasses import dataclass
from typing import Literal, cast

from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from inference.engine.activations import ARRAY_DTYPES, CapturedActivations, all_finite
from inference.engine.errors import RequestFault
from inference.engine.local_rows import LocalRows
from inference.engine.row_files import RowFile, RowShelf
from inference.engine.sampling import (
    convert_logprobs,
    convert_prompt_logprobs,
    make_sampling_params,
    needs_own_temperature,
)
from inference.engine.stream_options import (
    StreamOptions,
    check_capture_layers,
    check_steering_vector,
    encode_options,
    read_host_id,
)
from inference.wire import EngineDelta, EngineRequest, TensorDtype


@dataclass(frozen=True)
class EngineFacts:
    """What an engine serves. `dtype` is the residual stream's."""

    n_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: TensorDtype


@dataclass(frozen=True)
class RowFormat:
    """What stands in a captured row of one layer: `columns` values of `dtype`.

    They are the residual stream, or its components along the directions that the workers keep as `projection`.
    """

    columns: int
    dtype: TensorDtype
    projection: str = ""


@dataclass(frozen=True)
class WorkerRanks:
    """The engine's worker ranks that share memory with the front, and whether they can pick extra logprobs."""

    local: frozenset[int]
    has_extra_logprobs: bool


class OpenRequest:
    """One request on its way through an engine. Always `close` it."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        facts: EngineFacts,
        ranks: WorkerRanks,
        shelf: RowShelf,
        rows: LocalRows | None = None,
        row_format: RowFormat | None = None,
    ) -> None:
        """Check the request and make its row file; `rows` is memory of this process for an engine that is in it.

        Values in such memory are not looked at. Raises `RequestFault` for what the engine cannot do.
        """
        self._request = request
        self._format = row_format or RowFormat(facts.hidden_size, facts.dtype)
        self._facts = facts
        self._ranks = ranks.local
        self._generated = 0
        self._is_finished = False
        self._file: RowFile | LocalRows | None = rows
        sampling = request.sampling
        self.max_rows = len(request.prompt_token_ids) + max(1, sampling.max_tokens) - 1
        try:
            self._check(ranks)
            if self._file is None and (request.capture_layers or request.steering):
                itemsize = ARRAY_DTYPES[self._format.dtype].itemsize
                self._file = shelf.make(row_bytes=len(request.capture_layers) * self._format.columns * itemsize)
            self.params: SamplingParams = make_sampling_params(sampling, extra_args=self._extra_args())
        except (ValueError, OSError) as error:
            self.close()
            raise RequestFault(f"the engine refuses this request: {error}") from error
        # A cache of its own: captured prompt tokens must go through the model, and steered keys and values stay apart.
        salt = uuid.uuid4().hex if self._file is not None else None
        self.prompt: TokensInput = tokens_input(list(request.prompt_token_ids), cache_salt=salt)

    def take(self, output: RequestOutput) -> list[EngineDelta]:
        """Return what this output of vLLM's releases; call it for each one, in order.

        Raises `RequestFault` when a worker marked the request, or when rows are missing at its end: nothing of the
        output may then be released.
        """
        completions = cast("list[CompletionOutput]", output.outputs)
        self._generated += sum(len(completion.token_ids) for completion in completions)
        self._is_finished = output.finished
        self._require_no_fault()
        if output.finished:
            self._require_rows(completions[-1])
        return [self._make_delta(output, completion) for completion in completions]

    def captured(self) -> CapturedActivations | None:
        """Return the rows after the last output; None when nothing was asked for. Raises `RequestFault`."""
        request, file = self._request, self._file
        if not request.capture_layers or file is None:
            return None
        dtype = self._format.dtype
        array = file.read(
            rows=self._expected_rows,
            layers=len(request.capture_layers),
            columns=self._format.columns,
            dtype=ARRAY_DTYPES[dtype],
        )
        if isinstance(file, RowFile) and not all_finite(array, dtype):
            raise RequestFault("the captured residual stream holds a value that is not finite")
        return CapturedActivations(layers=request.capture_layers, dtype=dtype, array=array)

    def close(self) -> None:
        """Remove the row file, or let go of the memory, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _expected_rows(self) -> int:
        # The last sampled token never goes through the model.
        return len(self._request.prompt_token_ids) + self._generated - 1

    def _check(self, ranks: WorkerRanks) -> None:
        request, facts = self._request, self._facts
        sampling = request.sampling
        if not request.prompt_token_ids:
            raise ValueError("the prompt is empty")
        if any(not 0 <= token_id < facts.vocab_size for token_id in request.prompt_token_ids):
            raise ValueError(f"a prompt token is outside the vocabulary of {facts.vocab_size}")
        if len(request.prompt_token_ids) + max(1, sampling.max_tokens) > facts.max_model_len + 1 - bool(
            sampling.max_tokens
        ):
            raise ValueError(
                f"{len(request.prompt_token_ids)} prompt tokens and max_tokens {sampling.max_tokens} "
                f"are past the context of {facts.max_model_len}"
            )
        if sampling.logprob_token_ids and not ranks.has_extra_logprobs:
            raise ValueError("logprob_token_ids is not served by this engine's model runner")
        if not request.capture_layers and not request.steering:
            return
        if sampling.n != 1:
            raise ValueError("a request that captures or steers has n = 1")
        check_capture_layers(request.capture_layers, n_layers=facts.n_layers)
        for vector in request.steering:
            check_steering_vector(
                vector, n_layers=facts.n_layers, hidden_size=facts.hidden_size, max_rows=self.max_rows
            )

    def _extra_args(self) -> dict[str, object] | None:
        request, sampling = self._request, self._request.sampling
        own_temperature = needs_own_temperature(sampling.temperature)
        if self._file is None and not own_temperature and not sampling.logprob_token_ids:
            return None
        return encode_options(
            StreamOptions(
                path="" if self._file is None else str(self._file.path),
                host="" if self._file is None else read_host_id(),
                max_rows=self.max_rows,
                capture_layers=request.capture_layers,
                # A vector of scale 0 changes nothing; the request still has a cache of its own.
                steering=tuple(vector for vector in request.steering if vector.scale != 0),
                temperature=sampling.temperature if own_temperature else None,
                top_logprobs=sampling.logprobs or 0,
                logprob_token_ids=sampling.logprob_token_ids if sampling.logprobs is not None else (),
                projection=self._format.projection,
            )
        )

    def _require_no_fault(self) -> None:
        if self._file is None:
            return
        if self._file.fault is not None:
            raise RequestFault(f"the engine could not do this request: {self._file.fault}")
        if not self._file.is_taken_up_by(self._ranks):
            raise RequestFault("a worker of the engine did not take up this request's options")

    def _require_rows(self, last: CompletionOutput) -> None:
        if self._file is None or not self._request.capture_layers:
            return
        done, expected = self._file.rows_done, self._expected_rows
        # After a stop the engine may have run on for a step before it heard of it.
        if done < expected or (done > expected and last.finish_reason == "length"):
            raise RequestFault(f"{done} rows of the residual stream were captured where {expected} were due")

    def _make_delta(self, output: RequestOutput, completion: CompletionOutput) -> EngineDelta:
        sampling = self._request.sampling
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and output.prompt_logprobs:
            prompt_logprobs = convert_prompt_logprobs(output.prompt_logprobs)
        if sampling.max_tokens == 0:
            return EngineDelta(index=completion.index, prompt_logprobs=prompt_logprobs, finish_reason="length")
        logprobs = None
        if sampling.logprobs is not None and completion.logprobs is not None:
            logprobs = convert_logprobs(completion.logprobs, sampling)
        return EngineDelta(
            index=completion.index,
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=_finish_reason(completion.finish_reason),
            stop_reason=completion.stop_reason,
        )


def _finish_reason(reason: str | None) -> Literal["stop", "length"] | None:
    if reason in (None, "stop", "length"):
        return cast('Literal["stop", "length"] | None', reason)
    raise RequestFault(f"the engine ended this request for an unexpected reason: {reason}")
