"""Faults of single requests, aborts and what is left behind: nothing."""

import asyncio
import contextlib
import os
import time
import uuid
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from inference.engine.errors import RequestFault
from inference.engine.row_files import RowFile, RowShelf, RowWriter
from inference.engine.stream_options import EXTRA_ARGS_KEY, StreamOptions, encode_options, read_host_id
from inference.wire import EngineRequest
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    generated_ids,
    make_prompt,
    make_request,
    make_values,
    make_vector,
)


def assert_nothing_left(engine: EngineThread) -> None:
    """Assert that neither the front nor any worker holds anything of a request."""
    assert engine.engine.num_unfinished == 0
    deadline = time.monotonic() + 60
    while any(worker["requests"] for worker in engine.describe_workers()):
        # The finished ids reach the workers with the engine's next step.
        assert time.monotonic() < deadline, engine.describe_workers()
        time.sleep(0.01)
    assert engine.engine._shelf.list_own() == []


def test_aborted_requests_leave_nothing_behind(roomy: EngineThread) -> None:
    """Fault 10 of the peer: what aborted requests had captured was never freed."""

    async def take_some_and_leave(request: EngineRequest, n_deltas: int) -> int:
        taken = 0
        async with contextlib.aclosing(roomy.engine.generate(request)) as items:
            async for _ in items:
                taken += 1
                if taken == n_deltas:
                    break
        return taken

    async def leave_all() -> list[int]:
        return await asyncio.gather(*(take_some_and_leave(one, 1 + i % 5) for i, one in enumerate(requests)))

    requests = [
        make_request(
            make_prompt(50, seed=index),
            capture=ALL_LAYERS,
            steering=[make_vector(make_values(1, HIDDEN), (1,))] if index % 2 else (),
            max_tokens=400,
        )
        for index in range(20)
    ]
    assert roomy.run(leave_all()) == [1 + i % 5 for i in range(20)]
    assert_nothing_left(roomy)


def test_a_cancelled_request_is_out_of_the_engine_within_a_second(roomy: EngineThread) -> None:
    (core,) = map(psutil.Process, roomy.engine.process_ids)

    def used() -> float:
        times = core.cpu_times()
        return times.user + times.system

    async def cancel() -> float:
        task = asyncio.create_task(roomy.engine.answer(make_request(make_prompt(30), capture=(1,), max_tokens=480)))
        await asyncio.sleep(0.1)
        assert roomy.engine.num_unfinished == 1
        task.cancel()
        started = used()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await roomy.engine.call_workers("describe_stream"))[0]["requests"]:
            pass
        return used() - started

    # Of its own time: what else the machine does is not in it.
    assert roomy.run(cancel()) < 1.0
    assert_nothing_left(roomy)


def test_requests_aborted_before_their_first_step_do_no_harm(roomy: EngineThread) -> None:
    """Their row files are gone when a worker first hears of them."""

    async def cancel_at_once() -> None:
        for round_number in range(40):
            tasks = [asyncio.create_task(roomy.engine.answer(one)) for one in requests]
            for _ in range(round_number % 8):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    requests = [make_request(make_prompt(300, seed=index), capture=ALL_LAYERS) for index in range(5)]
    roomy.run(cancel_at_once())
    assert not roomy.engine.is_dead
    assert_nothing_left(roomy)
    assert len(generated_ids(roomy.answer(requests[0]))) == 8


def test_a_row_file_that_is_gone_is_a_fault_of_its_request(
    roomy: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = roomy.engine._shelf.make

    def make_and_lose(*, row_bytes: int) -> RowFile:
        file = make(row_bytes=row_bytes)
        file.path.unlink()
        return file

    with monkeypatch.context() as patched:
        patched.setattr(roomy.engine._shelf, "make", make_and_lose)
        with pytest.raises(RequestFault, match="did not take up"):
            roomy.answer(make_request(make_prompt(9), capture=(0, 1)))
    assert len(generated_ids(roomy.answer(make_request(make_prompt(9), capture=(0, 1))))) == 8


def test_a_worker_refuses_what_a_front_let_through(roomy: EngineThread) -> None:
    """The worker checks again: each of these reaches it, marks its own request and no other."""
    host = read_host_id()
    good = make_vector(make_values(1, HIDDEN), (1,))
    cases: dict[str, tuple[dict[str, Any], int, str]] = {
        "layer": ({"capture_layers": (9,)}, HIDDEN * 4, "layer"),
        "order": ({"capture_layers": (2, 1)}, HIDDEN * 8, "ascend"),
        "size": ({"capture_layers": (1,)}, HIDDEN * 2, "rows of 128 bytes"),
        "vector": ({"steering": (msgspec.structs.replace(good, shape=(1, 32)),)}, 0, "shape"),
        "steered layer": ({"steering": (msgspec.structs.replace(good, layer_indices=(7,)),)}, 0, "layers"),
        "span": ({"steering": (msgspec.structs.replace(good, position_spans=((3, 3),)),)}, 0, "span"),
        "position": (
            {"steering": (msgspec.structs.replace(good, shape=(1, 1, HIDDEN), position_indices=(500,)),)},
            0,
            "position",
        ),
        "too few rows": ({"capture_layers": (1,), "max_rows": 3}, HIDDEN * 4, "past the request's last"),
    }
    shelf = RowShelf("tests-worker-check")

    async def run_past_the_front(options: StreamOptions) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=2, temperature=0.0, extra_args=encode_options(options))
        async for _ in roomy.engine._llm.generate(tokens_input(list(make_prompt(10))), params, uuid.uuid4().hex):
            pass

    for name, (fields, row_bytes, sentence) in cases.items():
        file = shelf.make(row_bytes=row_bytes)
        try:
            options = StreamOptions(path=str(file.path), host=host, **({"max_rows": 11} | fields))
            roomy.run(run_past_the_front(options))
            assert file.fault is not None, name
            assert sentence in file.fault, name
            assert file.rows_done == 0
        finally:
            file.close()
    assert_nothing_left(roomy)


def test_an_error_in_a_worker_is_a_fault_and_never_an_answer(
    roomy: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 6 of the peer: an error in a hook was swallowed, and unsteered text came back.

    The row files are made with a row size that does not fit, which the worker finds out.
    """
    make = roomy.engine._shelf.make
    with monkeypatch.context() as patched:
        patched.setattr(roomy.engine._shelf, "make", lambda *, row_bytes: make(row_bytes=row_bytes + 1))
        with pytest.raises(RequestFault, match="could not do this request"):
            roomy.answer(make_request(make_prompt(9), capture=(0, 1)))
        with pytest.raises(RequestFault, match="could not do this request"):
            roomy.answer(make_request(make_prompt(9), steering=[make_vector(make_values(1, HIDDEN), (1,))]))
    assert_nothing_left(roomy)
    assert len(generated_ids(roomy.answer(make_request(make_prompt(9), capture=(0, 1))))) == 8


def test_options_that_no_worker_took_up_are_a_fault(roomy: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose options were lost or garbled on the way is not answered as if it had none."""
    for lost in ({f"not-{EXTRA_ARGS_KEY}": b""}, {EXTRA_ARGS_KEY: b"garbled"}):
        monkeypatch.setattr("inference.engine.open_request.encode_options", lambda _options, lost=lost: lost)
        with pytest.raises(RequestFault, match="did not take up"):
            roomy.answer(make_request(make_prompt(9), steering=[make_vector(make_values(1, HIDDEN), (1,))]))
    assert_nothing_left(roomy)


def test_a_faulty_request_leaves_its_neighbours_alone(roomy: EngineThread) -> None:
    overflowing = make_vector(np.full((1, HIDDEN), 3e38, np.float32), (0,), scale=1e6)
    requests = [
        make_request(make_prompt(40, seed=i), capture=(1,), steering=[overflowing] if i % 3 == 0 else ())
        for i in range(12)
    ]
    expected = [None if one.steering else generated_ids(roomy.answer(one)) for one in requests]
    for one, answer, ids in zip(requests, roomy.answer_all(requests), expected, strict=True):
        if one.steering:
            assert isinstance(answer, RequestFault)
        else:
            assert generated_ids(answer) == ids
    assert_nothing_left(roomy)


def test_steering_tensors_in_a_worker_are_bounded() -> None:
    import torch

    from inference.engine.steering import SteeringTensors

    tensors = SteeringTensors(torch.device("cpu"), max_bytes=10 * 4 * HIDDEN)
    for seed in range(50):
        vector = make_vector(make_values(1, HIDDEN, seed=seed), (1,))
        assert tensors.decode(vector).tolist() == make_values(1, HIDDEN, seed=seed).tolist()
        assert tensors.decode(vector) is tensors.decode(vector)
        assert tensors.nbytes <= 10 * 4 * HIDDEN


def test_a_start_sweeps_what_a_crashed_engine_left_and_nothing_else(tmp_path: Any) -> None:
    mine, other = RowShelf("tests-sweep"), RowShelf("tests-sweep-other")
    living = mine.make(row_bytes=4)
    others = other.make(row_bytes=4)
    # A file whose process is gone: this one's pid with a start time that it never had.
    dead = living.path.with_name(f"acsinfra-rows-tests_sweep-{os.getpid()}-1.0-{uuid.uuid4().hex}")
    dead.write_bytes(b"left")
    try:
        assert mine.sweep() == 1
        assert not dead.exists()
        assert living.path.exists()
        assert others.path.exists()
    finally:
        living.close()
        others.close()
    assert not living.path.exists()


def test_a_row_file_is_private_and_counts_what_was_written() -> None:
    shelf = RowShelf("tests-rows")
    file = shelf.make(row_bytes=8)
    try:
        assert file.path.stat().st_mode & 0o777 == 0o600
        writer = RowWriter(str(file.path))
        assert not file.is_taken_up_by(frozenset({0, 1}))
        writer.take_up(1)
        writer.take_up(0)
        assert file.is_taken_up_by(frozenset({0, 1}))

        rows = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
        writer.write(0, rows[:2].reshape(-1))
        writer.write(2 * 16, rows[2].reshape(-1))
        writer.set_rows_done(3)
        assert file.rows_done == 3
        writer.mark_fault("first")
        writer.mark_fault("second")
        assert file.fault == "first"
        writer.close()
    finally:
        file.close()


def test_a_worker_opens_nothing_but_row_files(tmp_path: Any) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"x" * 8192)
    with pytest.raises(ValueError, match="not a row file"):
        RowWriter(str(stranger))
    assert stranger.read_bytes() == b"x" * 8192
