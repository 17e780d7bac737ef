"""The engine of a runner: vLLM in this process, reading whole prompts and handing out their residual streams."""

import contextlib
import itertools
import os
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from inference.engine.activations import ARRAY_DTYPES, CapturedActivations
from inference.engine.arguments import make_vllm_config
from inference.engine.errors import EngineDied, EngineRefused, RequestFault
from inference.engine.front import describe_engine
from inference.engine.local_rows import LocalRows
from inference.engine.open_request import EngineFacts, OpenRequest, RowFormat, WorkerRanks
from inference.engine.row_files import RowShelf
from inference.engine.self_test import run_self_test
from inference.wire import EngineDelta, EngineOptions, EngineRequest, Sampling

DEFAULT_WINDOW_TOKENS = 8192
# The one token that an engine must generate is dropped: it never goes through the model.
_READ_ONLY = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
type Place = Callable[[int], npt.NDArray[np.generic]]


@dataclass(frozen=True)
class CapturedPrompt:
    """A prompt that was read: the ids the engine read, and `array` [layers, tokens, hidden].

    The array's dtype is the model's, int16 bits for bfloat16; float32 [layers, tokens, directions] where directions
    were given. Its values are as the model gave them, not finite ones too. `index` is the caller's.
    """

    index: int
    token_ids: tuple[int, ...]
    array: npt.NDArray[np.generic]


@dataclass
class _InFlight:
    opened: OpenRequest
    request: EngineRequest
    index: int
    deltas: list[EngineDelta]


class HarvestEngine:
    """One loaded model that reads prompts, many at once; make it with `start`.

    Call `environment.prepare_environment` before this module is imported. Not thread-safe.
    """

    def __init__(
        self, llm: LLMEngine, *, facts: EngineFacts, shelf: RowShelf, ranks: WorkerRanks, is_compiled: bool = False
    ) -> None:
        """Wrap a loaded LLMEngine; `start` is the way to make one."""
        self._llm = llm
        self._shelf = shelf
        self._ranks = ranks
        # The workers of one rank are in this process, and write where the caller wants the values.
        self._is_local = [worker["pid"] for worker in self.describe_workers()] == [os.getpid()]
        self._in_flight: dict[str, _InFlight] = {}
        self._numbers = itertools.count()
        self.facts = facts
        self.is_compiled = is_compiled

    @classmethod
    def start(cls, options: EngineOptions, *, name: str, is_compiled: bool = False) -> Self:
        """Load the checkpoint in this process and run the self-test; seconds to minutes.

        `name` is this engine's among all on the host. `is_compiled`, where `arguments.can_compile`, takes longer to
        start, minutes the first time, and reads faster. Raises `EngineRefused`, with nothing left loaded.
        """
        shelf = RowShelf(name)
        shelf.sweep()
        config = make_vllm_config(options, is_compiled=is_compiled)
        try:
            llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except Exception as error:
            raise EngineRefused(f"the engine did not start: {error}") from error
        try:
            facts, ranks = describe_engine(config, llm.collective_rpc("describe_stream"))
            engine = cls(llm, facts=facts, shelf=shelf, ranks=ranks, is_compiled=is_compiled)
            _drive(run_self_test(engine))
        except (RequestFault, EngineDied, VLLMError) as error:
            _shut_down(llm)
            raise EngineRefused(f"the engine failed its self-test: {error}") from error
        except BaseException:
            _shut_down(llm)
            raise
        return engine

    def capture(
        self,
        prompts: Iterable[tuple[int, Sequence[int]] | None],
        layers: Sequence[int],
        *,
        directions: npt.NDArray[np.float32] | None = None,
        place: Place | None = None,
        window_tokens: int = DEFAULT_WINDOW_TOKENS,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[CapturedPrompt]:
        """Read prompts of token ids and yield each one's residual stream after `layers`, as they finish.

        Pulls from `prompts` only while fewer than `window_tokens` tokens are in flight, so that memory is bounded; a
        None among them means "none yet", and what is in flight goes on. `layers` ascend. `directions` [directions,
        hidden], of any length but zero: the streams are projected onto them, each scaled to length 1, on the device.
        `place` gives the C-ordered array to fill for a prompt's index. `should_stop` is asked once a step. Closing the
        iterator aborts what is in flight. Raises `RequestFault` naming a prompt's index, and `EngineDied`.
        """
        waiting = iter(prompts)
        is_exhausted = False
        tokens_in_flight = 0
        row_format = self._keep(directions)
        try:
            while not should_stop():
                while not is_exhausted and (tokens_in_flight < window_tokens or not self._in_flight):
                    try:
                        following = next(waiting)
                    except StopIteration:
                        is_exhausted = True
                        break
                    if following is None:
                        break
                    index, token_ids = following
                    self._add_prompt(index, token_ids, tuple(layers), row_format, place)
                    tokens_in_flight += len(token_ids)
                if not self._in_flight:
                    if is_exhausted:
                        return
                    continue
                for one, captured in self._step():
                    tokens_in_flight -= len(one.request.prompt_token_ids)
                    if captured is None:
                        raise RequestFault(f"prompt {one.index}: nothing was captured")
                    array = captured.array
                    if place is not None and not self._is_local:
                        array = place(one.index)
                        array[...] = captured.array
                    yield CapturedPrompt(one.index, one.request.prompt_token_ids, array)
        finally:
            self._abort_all()
            if row_format.projection:
                self._llm.collective_rpc("forget_directions", args=(row_format.projection,))

    async def answer(self, request: EngineRequest) -> tuple[list[EngineDelta], CapturedActivations | None]:
        """Run one request to its end while nothing else runs; never suspends."""
        self._add(request, index=0)
        try:
            while self._in_flight:
                for one, captured in self._step():
                    return one.deltas, captured
        finally:
            self._abort_all()
        raise EngineDied("the engine ended a request without an answer")

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `ResidualStreamWorker` on every rank; one answer a rank. Never suspends."""
        return cast("list[Any]", self._llm.collective_rpc(method, args=arguments))

    def describe_workers(self) -> list[dict[str, Any]]:
        """What each rank serves and holds at present."""
        return cast("list[dict[str, Any]]", self._llm.collective_rpc("describe_stream"))

    def shutdown(self) -> None:
        """Abort what is in flight and free the model."""
        with contextlib.suppress(EngineDied):
            self._abort_all()
        _shut_down(self._llm)

    def _keep(self, directions: npt.NDArray[np.float32] | None) -> RowFormat:
        if directions is None:
            return RowFormat(self.facts.hidden_size, self.facts.dtype)
        row_format = RowFormat(len(directions), "float32", uuid.uuid4().hex)
        content = np.ascontiguousarray(directions, "<f4").tobytes()
        self._llm.collective_rpc("keep_directions", args=(row_format.projection, content))
        return row_format

    def _add_prompt(
        self,
        index: int,
        token_ids: Sequence[int],
        layers: tuple[int, ...],
        row_format: RowFormat,
        place: Place | None,
    ) -> None:
        request = EngineRequest(
            request_id=f"harvest-{next(self._numbers)}",
            prompt_token_ids=tuple(token_ids),
            sampling=_READ_ONLY,
            capture_layers=layers,
        )
        array = None
        if self._is_local and place is not None:
            array = place(index)
        try:
            self._add(request, index=index, row_format=row_format, array=array)
        except RequestFault as error:
            raise RequestFault(f"prompt {index}: {error}") from error

    def _add(
        self,
        request: EngineRequest,
        *,
        index: int,
        row_format: RowFormat | None = None,
        array: npt.NDArray[np.generic] | None = None,
    ) -> None:
        row_format = row_format or RowFormat(self.facts.hidden_size, self.facts.dtype)
        rows = None
        if self._is_local and (request.capture_layers or request.steering):
            if array is None:
                n_rows = len(request.prompt_token_ids) + max(1, request.sampling.max_tokens) - 1
                shape = (len(request.capture_layers), n_rows, row_format.columns)
                array = np.empty(shape, ARRAY_DTYPES[row_format.dtype])
            rows = LocalRows(array)
        opened = OpenRequest(
            request, facts=self.facts, shelf=self._shelf, ranks=self._ranks, rows=rows, row_format=row_format
        )
        if request.sampling is _READ_ONLY:
            opened.params.detokenize = False
        self._in_flight[request.request_id] = _InFlight(opened, request, index, [])
        try:
            self._llm.add_request(request.request_id, opened.prompt, opened.params)
        except (VLLMError, ValueError, TypeError) as error:
            self._in_flight.pop(request.request_id).opened.close()
            raise RequestFault(f"vLLM refuses this request: {error}") from error

    def _step(self) -> Iterator[tuple[_InFlight, CapturedActivations | None]]:
        """Take one step of the engine; yield what finished in it."""
        try:
            outputs = self._llm.step()
        except Exception as error:
            raise EngineDied(f"the engine failed in a step: {error}") from error
        for output in outputs:
            one = self._in_flight.get(output.request_id)
            if one is None or not isinstance(output, RequestOutput):
                continue
            try:
                one.deltas += one.opened.take(output)
                captured = one.opened.captured() if output.finished else None
            except RequestFault as error:
                raise RequestFault(f"prompt {one.index}: {error}") from error
            if output.finished:
                self._in_flight.pop(output.request_id).opened.close()
                yield one, captured

    def _abort_all(self) -> None:
        try:
            if self._in_flight:
                self._llm.abort_request(list(self._in_flight))
            # One more step carries the finished ids to the workers; an idle engine takes none by itself.
            self._llm.step()
        except Exception as error:
            raise EngineDied(f"the engine failed in a step: {error}") from error
        finally:
            for one in self._in_flight.values():
                one.opened.close()
            self._in_flight.clear()


def _drive(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends: the self-test is shared with the asynchronous front."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("a synchronous engine's coroutine was suspended")


def _shut_down(llm: LLMEngine) -> None:
    llm.engine_core.shutdown()
    cleanup_dist_env_and_memory()
