"""The vLLM worker that captures and steers: named to vLLM as `worker_cls`, on CPU and on GPUs alike.

vLLM imports this module in each worker process. It installs the tap when the model is loaded, tells the residual
stream of each step, and answers the calls that the engine's start and tests make (`collective_rpc`).
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from inference.engine.decoder_layers import find_decoder_layers, require_unscaled_stream
from inference.engine.gloo_device import share_gloo_device
from inference.engine.leftovers import end_with_parent
from inference.engine.residual_stream import ResidualStream, cumulate
from inference.engine.sampling_patches import add_extra_logprobs, rewind_seeded_generators
from inference.engine.stream_check import StreamCheck
from inference.engine.tap import install_taps

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    from inference.engine.float32_products import multiply_in_float32
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class ResidualStreamWorker(PlatformWorker):
    """vLLM's worker of this platform, with the residual stream in reach."""

    def init_device(self) -> None:
        """Join the other ranks."""
        share_gloo_device()
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Load the model and put a tap behind each decoder block. Raises `LookupError` for an unknown shape."""
        if current_platform.is_cpu():
            multiply_in_float32(kv_cache_bytes=self.cache_config.kv_cache_memory_bytes or 0)
        super().load_model(**kwargs)
        # An engine core in a process of its own; vLLM ends the further ranks of one by itself.
        if multiprocessing.current_process().name.startswith("EngineCore"):
            end_with_parent()
        runner = self.model_runner
        model = runner.get_model()
        n_layers = self.model_config.get_total_num_hidden_layers()
        self.stream = ResidualStream(
            n_layers=n_layers,
            hidden_size=self.model_config.get_hidden_size(),
            dtype=self.model_config.dtype,
            device=self.device,
            rank=self.rank,
        )
        layers = find_decoder_layers(model, n_layers)
        require_unscaled_stream(layers, self.model_config.dtype)
        install_taps(layers, self.stream)
        self.stream_check = StreamCheck(model, self.stream)
        if self.use_v2_model_runner:
            runner.prepare_inputs = self._place_rows_v2(runner.prepare_inputs)
        else:
            runner._prepare_inputs = self._place_rows_v1(runner._prepare_inputs)
            add_extra_logprobs(runner, self.stream)
            if current_platform.is_cpu():
                rewind_seeded_generators(runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step of the model, capturing and steering."""
        self.stream.begin_step(
            finished=scheduler_output.finished_req_ids,
            new=[(request.req_id, request.sampling_params) for request in scheduler_output.scheduled_new_reqs],
            preempted=len(scheduler_output.preempted_req_ids or ()),
        )
        try:
            output = super().execute_model(scheduler_output)
        except BaseException:
            self.stream.cancel_step()
            raise
        self.stream.end_step()
        return output

    def _place_rows_v1(self, prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
        runner = self.model_runner

        def prepare_and_place(scheduler_output: Any, counts: Any) -> Any:
            prepared = prepare_inputs(scheduler_output, counts)
            batch = runner.input_batch
            self.stream.place_rows(batch.req_ids, cumulate(counts), batch.num_computed_tokens_cpu[: len(batch.req_ids)])
            return prepared

        return prepare_and_place

    def _place_rows_v2(self, prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_and_place(*args: Any, **kwargs: Any) -> Any:
            batch = prepare_inputs(*args, **kwargs)
            self.stream.place_rows(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)
            return batch

        return prepare_and_place

    # Called by name from the front ------------------------------------------------------------------------------

    def describe_stream(self) -> dict[str, Any]:
        """Say what this rank serves and holds."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": self.stream.host,
            "n_layers": self.stream.n_layers,
            "hidden_size": self.stream.hidden_size,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "runner": "v2" if self.use_v2_model_runner else "v1",
            "stream_kind": self.stream.kind,
            **self.stream.describe(),
        }

    def keep_directions(self, name: str, content: bytes) -> None:
        """Keep directions for captures that name them; see `ResidualStream.keep_directions`."""
        self.stream.keep_directions(name, content)

    def forget_directions(self, name: str) -> None:
        """Drop directions."""
        self.stream.forget_directions(name)

    def arm_stream_check(self) -> None:
        """Watch the next forward to see which tensor is the residual stream."""
        self.stream_check.arm()

    def settle_stream_kind(self) -> dict[str, Any]:
        """Decide from the watched forward which tensor it is; see `StreamCheck.settle`."""
        with torch.inference_mode():
            return self.stream_check.settle()

    def score_stream_rows(self, content: bytes, token_ids: list[list[int]]) -> list[list[float]]:
        """Return the logprobs that rows of the last layer give to tokens; see `StreamCheck.score_rows`."""
        with torch.inference_mode():
            return self.stream_check.score_rows(content, token_ids)
