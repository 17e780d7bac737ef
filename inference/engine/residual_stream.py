"""The residual stream inside one worker: whose rows are where in a step, what is captured and what is changed.

One `ResidualStream` lives in each worker. The worker tells it of each step's scheduler output, the wrapped model
runner of where each request's rows lie, and the tap of each block's output. Only absolute positions count
(`num_computed_tokens`), so that chunks, preemption and recomputation write the same rows again.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from inference.engine.local_rows import LocalRowWriter, open_rows
from inference.engine.row_files import RowWriter
from inference.engine.steering import PlacedVector, SteeringTensors, steer_rows
from inference.engine.stream_options import StreamOptions, check_capture_layers, decode_options, read_host_id

# The most that captured rows may take on the device before they are moved to their files.
STAGE_BYTES = 128 * 1024 * 1024

StreamKind = str
"""How a block gives the residual stream: "sum" (delta + residual) or "first" (its first or only tensor)."""


@dataclass
class StreamRequest:
    """One request that captures or steers, from its first step until the scheduler says that it finished."""

    options: StreamOptions
    writer: RowWriter | LocalRowWriter | None
    directions: torch.Tensor | None = None
    vectors: list[PlacedVector] = field(default_factory=list)
    is_faulty: bool = False
    rows_done: int = 0

    def mark_fault(self, error: BaseException) -> None:
        """Stop acting for this request and let the front know why."""
        self.is_faulty = True
        if self.writer is None:
            # A rank whose host shares no memory with the front has no way to say it: better no engine than
            # an answer that is steered on some ranks only.
            raise RuntimeError(f"residual stream: {error}") from error
        self.writer.mark_fault(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class PlacedRequest:
    """A request's rows in one step: rows `row` to `row` + `count` - 1 are positions from `position` on."""

    request: StreamRequest
    row: int
    count: int
    position: int


@dataclass
class StepPlan:
    """What one forward has to do.

    Where all captures of the step go into memory of this process, `straight` has for each layer the rows of the step
    and the memory they belong in. Else `rows`, in all `n_rows`, are staged, projected onto `directions` where there
    are any.
    """

    captures: list[PlacedRequest]
    steered: dict[int, list[PlacedRequest]]
    layers: list[int]
    rows: slice | torch.Tensor
    n_rows: int
    straight: dict[int, list[tuple[slice, torch.Tensor]]] | None = None
    directions: torch.Tensor | None = None


class ResidualStream:
    """Captures and steers for one worker. Not thread-safe: all calls come from the worker's own thread."""

    def __init__(self, *, n_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        """Serve a model of `n_layers` blocks; rank 0 alone writes captures, every rank steers."""
        self.n_layers = n_layers
        self.hidden_size = hidden_size
        self.kind: StreamKind | None = None
        self.probe: Callable[[torch.Tensor, torch.Tensor | None], None] | None = None
        self.dtype = dtype
        self.device = device
        self._rank = rank
        self._host = read_host_id()
        self._requests: dict[str, StreamRequest] = {}
        self._tensors = SteeringTensors(device)
        self._plan: StepPlan | None = None
        self._in_flight = False
        self._preemptions = 0
        self._host_bytes = 0
        self._directions: dict[str, torch.Tensor] = {}
        self._storage = torch.empty(0, dtype=torch.uint8, device=device)
        self._group: list[int] = []
        self._group_size = 1

    # Steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, *, finished: Iterable[str], new: Iterable[tuple[str, Any]], preempted: int = 0) -> None:
        """Take note of a scheduler output: ids that finished, and new ids with their sampling parameters."""
        self._preemptions += preempted
        for request_id in finished:
            self._drop(request_id)
        for request_id, parameters in new:
            # Under Runner V2 a preempted request comes back as a new one: it keeps what it has.
            if request_id not in self._requests and parameters is not None:
                self._admit(request_id, parameters)
        self._in_flight = True

    def place_rows(self, request_ids: Sequence[str], starts: Sequence[int], computed: Sequence[int]) -> None:
        """Say where rows are: request i has rows starts[i] to starts[i + 1] - 1, positions from computed[i] on."""
        if not self._in_flight or not self._requests:
            return
        placed = []
        for index, request_id in enumerate(request_ids):
            request = self._requests.get(request_id)
            if request is None or request.is_faulty:
                continue
            row, count = int(starts[index]), int(starts[index + 1]) - int(starts[index])
            placed.append(PlacedRequest(request, row, count, int(computed[index])))
        self._plan = self._make_plan(placed)

    def end_step(self) -> None:
        """Move what is staged to the files and say how far each request has come."""
        plan, self._plan, self._in_flight = self._plan, None, False
        if plan is None:
            return
        self._flush(plan)
        for placed in plan.captures:
            request = placed.request
            if request.is_faulty or request.writer is None:
                continue
            if placed.position > request.rows_done:
                request.mark_fault(ValueError(f"positions {request.rows_done} to {placed.position - 1} never came"))
                continue
            request.rows_done = max(request.rows_done, placed.position + placed.count)
            request.writer.set_rows_done(request.rows_done)

    def cancel_step(self) -> None:
        """Forget a step whose forward raised."""
        self._plan, self._in_flight, self._group = None, False, []

    # The tap ---------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the coming calls of `on_block` would do nothing."""
        return self._plan is None and self.probe is None

    def on_block(self, layer: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        """Steer, then capture, what block `layer` gave; in place."""
        if self._in_flight and self.probe is not None and layer == self.n_layers - 1:
            self.probe(first, second)
        plan = self._plan
        if plan is None:
            return
        first = first.view(-1, first.shape[-1])
        second = None if second is None else second.view(-1, second.shape[-1])
        for placed in plan.steered.get(layer, ()):
            if placed.request.is_faulty:
                continue
            try:
                self._steer(placed, layer, first, second)
            except Exception as error:  # noqa: BLE001 - one request's fault is its own
                placed.request.mark_fault(error)
        if layer in plan.layers:
            try:
                self._stage(plan, layer, first, second)
            except Exception as error:  # noqa: BLE001 - shared by the captures of this step, and by nobody else
                for placed in plan.captures:
                    placed.request.mark_fault(error)
                plan.captures, plan.layers, self._group = [], [], []

    # What tests and the start ask ------------------------------------------------------------------------------

    def describe(self) -> dict[str, int]:
        """Count what is held: requests, bytes of steering tensors and of the stage; and, since the start, preemptions.

        `host_bytes` are the captured bytes that left the device for the host's memory, since the start too.
        """
        return {
            "requests": len(self._requests),
            "steering_bytes": self._tensors.nbytes,
            "stage_bytes": self._storage.nbytes,
            "preemptions": self._preemptions,
            "host_bytes": self._host_bytes,
        }

    def keep_directions(self, name: str, content: bytes) -> None:
        """Keep directions, float32 [directions, hidden] of any length but zero, for captures that name them."""
        directions = torch.frombuffer(bytearray(content), dtype=torch.float32).view(-1, self.hidden_size)
        # In float64, because a direction's square may be past float32, and a component far below both its factors.
        exact = directions.to(self.device, torch.float64)
        exact = exact / torch.linalg.vector_norm(exact, dim=1, keepdim=True)
        self._directions[name] = exact.T.contiguous()

    def forget_directions(self, name: str) -> None:
        """Drop directions that no capture will name again."""
        self._directions.pop(name, None)

    @property
    def host(self) -> str:
        """The id of this worker's host."""
        return self._host

    def options_of(self, request_id: str) -> StreamOptions | None:
        """The options of a request that is in the worker at present."""
        request = self._requests.get(request_id)
        return None if request is None else request.options

    # Inside ----------------------------------------------------------------------------------------------------

    def _admit(self, request_id: str, parameters: Any) -> None:
        try:
            options = decode_options(parameters.extra_args)
        except msgspec.MsgspecError:
            return  # nobody takes it up, which its front sees
        if options is None:
            return
        if options.temperature is not None:
            parameters.temperature = options.temperature
        is_local = options.host == self._host
        try:
            writer = open_rows(options.path) if options.path and is_local else None
        except (OSError, ValueError):
            # Its front aborted it before its first step; one that still waits sees that nobody took the options up.
            return
        request = StreamRequest(options, writer)
        self._requests[request_id] = request
        try:
            self._prepare(request)
        except Exception as error:  # noqa: BLE001 - one request's fault is its own
            request.mark_fault(error)

    def _prepare(self, request: StreamRequest) -> None:
        options = request.options
        check_capture_layers(options.capture_layers, n_layers=self.n_layers)
        if (options.capture_layers or options.steering) and self.kind is None:
            raise ValueError("which tensor is the residual stream is not known yet")
        if options.projection:
            request.directions = self._directions.get(options.projection)
            if request.directions is None:
                raise ValueError("the directions to project onto are not known")
        if request.writer is not None:
            columns, dtype = self._row_format(request.directions)
            row_bytes = len(options.capture_layers) * columns * dtype.itemsize
            if request.writer.row_bytes != row_bytes:
                raise ValueError(f"rows of {request.writer.row_bytes} bytes where {row_bytes} are needed")
        request.vectors = [
            PlacedVector(
                vector,
                self._tensors,
                n_layers=self.n_layers,
                hidden_size=self.hidden_size,
                max_rows=options.max_rows,
            )
            for vector in options.steering
        ]
        if request.writer is not None:
            request.writer.take_up(self._rank)

    def _drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.writer is not None:
            request.writer.close()

    def _make_plan(self, placed: list[PlacedRequest]) -> StepPlan | None:
        steered: dict[int, list[PlacedRequest]] = {}
        for one in placed:
            # The last layer is looked at for every steered request: what overflowed on the way shows there.
            layers = {self.n_layers - 1} if one.request.vectors else set()
            for layer in layers.union(*(vector.layers for vector in one.request.vectors)):
                steered.setdefault(layer, []).append(one)
        captures = [one for one in placed if one.request.options.capture_layers] if self._rank == 0 else []
        for one in captures:
            if one.request.directions is not captures[0].request.directions:
                one.request.mark_fault(ValueError("a step projects onto one set of directions at most"))
        captures = [one for one in captures if not one.request.is_faulty]
        if not captures and not steered:
            return None
        layers_to_stage = sorted({layer for one in captures for layer in one.request.options.capture_layers})
        n_rows = sum(one.count for one in captures)
        if captures and captures[-1].row + captures[-1].count - captures[0].row == n_rows:
            rows: slice | torch.Tensor = slice(captures[0].row, captures[0].row + n_rows)
        else:
            rows = torch.cat([torch.arange(one.row, one.row + one.count) for one in captures] or [torch.empty(0)])
            rows = rows.to(self.device)
        plan = StepPlan(captures, steered, layers_to_stage, rows, n_rows)
        if captures:
            plan.directions = captures[0].request.directions
            plan.straight = self._go_straight(captures, layers_to_stage)
        columns, dtype = self._row_format(plan.directions)
        self._group_size = max(1, min(len(layers_to_stage), STAGE_BYTES // max(1, n_rows * columns * dtype.itemsize)))
        return plan

    def _row_format(self, directions: torch.Tensor | None) -> tuple[int, torch.dtype]:
        """How many values stand in a captured row of one layer, and of which dtype."""
        return (self.hidden_size, self.dtype) if directions is None else (directions.shape[1], torch.float32)

    def _go_straight(
        self, captures: list[PlacedRequest], layers: list[int]
    ) -> dict[int, list[tuple[slice, torch.Tensor]]] | None:
        """Where each row belongs in memory of this process; None where a copy has to be staged first."""
        straight: dict[int, list[tuple[slice, torch.Tensor]]] = {layer: [] for layer in layers}
        for one in captures:
            writer, options = one.request.writer, one.request.options
            if (
                self.device.type != "cpu"
                or one.request.directions is not None
                or not isinstance(writer, LocalRowWriter)
            ):
                return None
            end = one.position + one.count
            if end > writer.tensor.shape[1]:
                return None  # staging says whose fault it is
            for column, layer in enumerate(options.capture_layers):
                straight[layer].append((slice(one.row, one.row + one.count), writer.tensor[column, one.position : end]))
        return straight

    def _steer(self, placed: PlacedRequest, layer: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        rows = slice(placed.row, placed.row + placed.count)
        delta = first[rows]
        residual = second[rows] if self.kind == "sum" and second is not None else None
        unsteered = delta.float() if residual is None else delta.float() + residual.float()
        if layer == self.n_layers - 1 and not bool(torch.isfinite(unsteered).all()):
            raise ValueError("the steered residual stream is no longer finite")
        result = steer_rows(placed.request.vectors, layer=layer, start=placed.position, unsteered=unsteered)
        if result is None:
            return
        touched, steered = result
        rounded = steered.to(first.dtype)
        if not bool(torch.isfinite(rounded).all()):
            raise ValueError("the steered residual stream is no longer finite")
        if residual is None:
            delta[touched] = rounded
        else:
            # The next block adds the two: with delta at zero the sum is the steered stream, exactly.
            delta[touched] = 0
            residual[touched] = rounded

    def _stage(self, plan: StepPlan, layer: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        summed = second if self.kind == "sum" else None
        if plan.straight is not None:
            for rows, into in plan.straight[layer]:
                _put_stream(first, summed, rows, into)
                self._host_bytes += into.nbytes
            return
        if len(self._group) == self._group_size:
            self._flush(plan)
        self._group.append(layer)
        slot = self._stage_view(plan)[:, len(self._group) - 1]
        if plan.directions is None:
            _put_stream(first, summed, plan.rows, slot)
        else:
            stream = first[plan.rows] if summed is None else first[plan.rows] + summed[plan.rows]
            slot.copy_(stream.double() @ plan.directions)

    def _stage_view(self, plan: StepPlan) -> torch.Tensor:
        columns, dtype = self._row_format(plan.directions)
        needed = plan.n_rows * self._group_size * columns * dtype.itemsize
        if self._storage.numel() < needed:
            self._storage = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._storage[:needed].view(dtype).view(plan.n_rows, self._group_size, columns)

    def _flush(self, plan: StepPlan) -> None:
        group, self._group = self._group, []
        if not group:
            return
        staged = self._stage_view(plan)[:, : len(group)].cpu()
        self._host_bytes += staged.nbytes
        offset = 0
        for placed in plan.captures:
            rows = staged[offset : offset + placed.count]
            offset += placed.count
            if placed.request.is_faulty or placed.request.writer is None:
                continue
            try:
                _write_rows(placed, rows, group)
            except Exception as error:  # noqa: BLE001 - one request's fault is its own
                placed.request.mark_fault(error)


def _write_rows(placed: PlacedRequest, rows: torch.Tensor, group: list[int]) -> None:
    """Write [rows, group, columns] where this request's positions and layers belong."""
    request, writer = placed.request, placed.request.writer
    if writer is None:
        return
    if placed.position + placed.count > request.options.max_rows:
        raise ValueError(f"position {placed.position + placed.count - 1} is past the request's last")
    wanted = request.options.capture_layers
    present = [layer for layer in wanted if layer in set(group)]
    if not present:
        return
    if present != group:
        rows = rows[:, [group.index(layer) for layer in present]]
    first = wanted.index(present[0])
    writer.write_rows(placed.position, range(first, first + len(present)), rows)


def _put_stream(
    first: torch.Tensor, second: torch.Tensor | None, rows: slice | torch.Tensor, into: torch.Tensor
) -> None:
    if second is None:
        into.copy_(first[rows])
    else:
        torch.add(first[rows], second[rows], out=into)


def cumulate(counts: Sequence[int]) -> list[int]:
    """Return where each of the counts starts, and where the last ends."""
    return [0, *itertools.accumulate(int(count) for count in counts)]
