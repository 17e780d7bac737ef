"""The engine of an inference worker: vLLM's AsyncLLM with residual streams, for many requests at once."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Self, cast

from vllm.exceptions import VLLMError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from inference.engine.activations import CapturedActivations
from inference.engine.arguments import make_vllm_config
from inference.engine.errors import EngineDied, EngineRefused, RequestFault
from inference.engine.fork_server import use_fork_server
from inference.engine.open_request import EngineFacts, OpenRequest, WorkerRanks
from inference.engine.row_files import RowShelf
from inference.engine.self_test import run_self_test
from inference.engine.stream_options import read_host_id
from inference.wire import EngineDelta, EngineOptions, EngineRequest, TensorDtype

# The core frees what it holds at once, and then takes seconds to unload its libraries; it need not be waited for.
_SHUTDOWN_SECONDS = 2.0


class InferenceEngine:
    """One loaded model that answers many requests at once; make it with `start`.

    Call `environment.prepare_environment` before this module is imported. All methods belong to the event loop that
    `start` ran in.
    """

    def __init__(self, llm: AsyncLLM, *, facts: EngineFacts, shelf: RowShelf, ranks: WorkerRanks) -> None:
        """Wrap a running AsyncLLM; `start` is the way to make one."""
        self._llm = llm
        self._shelf = shelf
        self._ranks = ranks
        self.facts = facts

    @classmethod
    async def start(cls, options: EngineOptions, *, name: str) -> Self:
        """Load the checkpoint and run the self-test; seconds to minutes.

        `name` is this engine's among all on the host: a start removes the row files that a crashed one left. Raises
        `EngineRefused`, with nothing left running.
        """
        use_fork_server()
        shelf = RowShelf(name)
        shelf.sweep()
        config = await asyncio.to_thread(make_vllm_config, options)
        try:
            llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config, disable_log_stats=True)
        except Exception as error:
            raise EngineRefused(f"the engine did not start: {error}") from error
        try:
            facts, ranks = describe_engine(config, await llm.collective_rpc("describe_stream"))
            engine = cls(llm, facts=facts, shelf=shelf, ranks=ranks)
            await run_self_test(engine)
        except (RequestFault, EngineDied, EngineDeadError, VLLMError) as error:
            await _shut_down(llm)
            raise EngineRefused(f"the engine failed its self-test: {error}") from error
        except BaseException:
            await _shut_down(llm)
            raise
        return engine

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta | CapturedActivations]:
        """Yield the request's deltas as they come and, when it captures, at the end one `CapturedActivations`.

        Closing or cancelling it stops the request in the engine. Raises `RequestFault` when this request failed and
        `EngineDied` when the engine did; nothing wrong is yielded before.
        """
        if self.is_dead:
            raise EngineDied("the engine is gone")
        opened = OpenRequest(request, facts=self.facts, shelf=self._shelf, ranks=self._ranks)
        try:
            outputs = self._llm.generate(opened.prompt, opened.params, request.request_id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    for delta in opened.take(output):
                        yield delta
            captured = await asyncio.to_thread(opened.captured) if request.capture_layers else None
            if captured is not None:
                yield captured
        except EngineDeadError as error:
            raise EngineDied("the engine's process ended while it worked on this request") from error
        except (VLLMError, ValueError, TypeError) as error:
            if self.is_dead:
                raise EngineDied("the engine's process ended while it worked on this request") from error
            raise RequestFault(f"vLLM refused or failed this request: {error}") from error
        finally:
            opened.close()

    async def answer(self, request: EngineRequest) -> tuple[list[EngineDelta], CapturedActivations | None]:
        """Run a request to its end and return all of its deltas, and its captures. Raises as `generate` does."""
        deltas: list[EngineDelta] = []
        captured = None
        async with contextlib.aclosing(self.generate(request)) as items:
            async for item in items:
                if isinstance(item, CapturedActivations):
                    captured = item
                else:
                    deltas.append(item)
        return deltas, captured

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `ResidualStreamWorker` on every rank; one answer a rank. Raises `EngineDied`."""
        try:
            return cast("list[Any]", await self._llm.collective_rpc(method, args=arguments))
        except EngineDeadError as error:
            raise EngineDied("the engine is gone") from error

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process is gone; such an engine never comes back."""
        return bool(self._llm.errored)

    @property
    def num_unfinished(self) -> int:
        """How many requests are in the engine at present; each of `n` sequences counts."""
        return int(self._llm.get_num_unfinished_requests())

    @property
    def process_ids(self) -> list[int]:
        """The pids of the engine's own processes, for `leftovers.record_engine_processes`."""
        manager = self._llm.engine_core.resources.engine_manager
        processes = [] if manager is None else manager.processes
        return [process.pid for process in processes if process.pid is not None]

    async def shutdown(self) -> None:
        """End the engine's processes; requests in flight raise `EngineDied`."""
        await _shut_down(self._llm)


async def _shut_down(llm: AsyncLLM) -> None:
    """End the engine's processes. vLLM would log the end of its own output task as an error, so that goes first."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        llm.output_processor.propagate_error(EngineDeadError())
    await asyncio.to_thread(llm.shutdown, _SHUTDOWN_SECONDS)


def describe_engine(config: Any, described: list[dict[str, Any]]) -> tuple[EngineFacts, WorkerRanks]:
    """Make an engine's facts of its configuration and of what each worker rank says of itself."""
    first = described[0]
    facts = EngineFacts(
        n_layers=first["n_layers"],
        hidden_size=first["hidden_size"],
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        dtype=cast("TensorDtype", first["dtype"]),
    )
    local = frozenset(worker["rank"] for worker in described if worker["host"] == read_host_id())
    return facts, WorkerRanks(local=local, has_extra_logprobs=all(worker["runner"] == "v1" for worker in described))
