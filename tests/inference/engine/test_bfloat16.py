"""A bfloat16 engine: as near to the truth as HuggingFace's own bfloat16; and how an engine's death shows."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from inference.engine.activations import to_float32
from inference.engine.errors import EngineDied
from inference.engine.leftovers import end_leftovers, forget_engine_processes, record_engine_processes
from inference.wire import EngineOptions
from tests.inference.engine.conftest import EngineThread
from tests.inference.engine.reference import ReferenceModel
from tests.inference.engine.requests import (
    ALL_LAYERS,
    HIDDEN,
    make_prompt,
    make_request,
    make_values,
    make_vector,
    sequence_read,
    spell_out,
)


@pytest.fixture(scope="module")
def engine(tiny_bfloat16: Path) -> Iterator[EngineThread]:
    """Return a bfloat16 engine of the rounded weights."""
    thread = EngineThread(
        EngineOptions(checkpoint=str(tiny_bfloat16), kv_cache_bytes=16 * 1024**2, max_num_seqs=16), name="tests-half"
    )
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def truth(tiny_bfloat16: Path) -> Iterator[ReferenceModel]:
    """Return the rounded weights, computed with in float32."""
    with ReferenceModel(tiny_bfloat16, dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def half(tiny_bfloat16: Path) -> Iterator[ReferenceModel]:
    """Return the rounded weights, computed with in HuggingFace's bfloat16."""
    with ReferenceModel(tiny_bfloat16, dtype="bfloat16") as model:
        yield model


@pytest.mark.parametrize("is_steered", [False, True])
def test_no_further_from_the_truth_than_huggingface(
    engine: EngineThread, truth: ReferenceModel, half: ReferenceModel, is_steered: bool
) -> None:
    vector = make_vector(make_values(1, HIDDEN), (1,), position_spans=((4, 44),))
    errors, errors_of_half = [], []
    for seed in range(4):
        request = make_request(
            make_prompt(40, seed=seed), capture=ALL_LAYERS, steering=[vector] if is_steered else (), max_tokens=8
        )
        answer = engine.answer(request)
        captured = answer[1]
        assert captured is not None
        assert captured.dtype == "bfloat16"
        assert captured.array.dtype == np.int16
        sequence = sequence_read(request, answer)
        steering = [spell_out(vector, len(sequence))] if is_steered else []
        expected = truth.read(sequence, steering).stream
        scale = np.linalg.norm(expected, axis=-1)
        errors.append(np.linalg.norm(to_float32(captured.array, "bfloat16") - expected, axis=-1) / scale)
        errors_of_half.append(np.linalg.norm(half.read(sequence, steering).stream - expected, axis=-1) / scale)
    ours, theirs = np.concatenate(errors, axis=1), np.concatenate(errors_of_half, axis=1)
    for layer in ALL_LAYERS:
        assert np.median(ours[layer]) <= 1.1 * np.median(theirs[layer])
        assert np.percentile(ours[layer], 99.9) <= 1.3 * np.percentile(theirs[layer], 99.9)


def test_everything_in_flight_ends_within_a_second_of_a_kill(engine: EngineThread, tmp_path: Path) -> None:
    """The last test of this module: kill -9 of the engine's process."""
    (core,) = engine.engine.process_ids
    record_engine_processes(tmp_path, engine_name="tests-half", pids=[core])

    async def kill_under_load() -> list[float]:
        requests = [make_request(make_prompt(30, seed=i), capture=(1,), max_tokens=480) for i in range(6)]
        tasks = [asyncio.create_task(engine.engine.answer(one)) for one in requests]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        os.kill(core, signal.SIGKILL)
        killed = time.monotonic()
        ended = []
        for task in tasks:
            with pytest.raises(EngineDied):
                await task
            ended.append(time.monotonic() - killed)
        return ended

    assert max(engine.run(kill_under_load())) < 1.0
    assert engine.engine.is_dead
    assert engine.engine._shelf.list_own() == []
    with pytest.raises(EngineDied):
        engine.answer(make_request(make_prompt(5)))
    forget_engine_processes(tmp_path, engine_name="tests-half")
    assert list(tmp_path.iterdir()) == []


def test_a_start_ends_what_a_killed_front_left_running(tmp_path: Path) -> None:
    """A stand-in for the engine's process: what counts is whose start time and whose front were recorded."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    front_code = (
        "import subprocess, sys, pathlib, os, signal\n"
        "from inference.engine.leftovers import record_engine_processes\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        f"core = subprocess.Popen({sleeper!r}, start_new_session=True, **quiet)\n"
        "record_engine_processes(pathlib.Path(sys.argv[1]), engine_name='left over', pids=[core.pid])\n"
        "print(core.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    front = subprocess.run(
        [sys.executable, "-c", front_code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert front.returncode == -signal.SIGKILL
    left = int(front.stdout)
    bystander = subprocess.Popen(sleeper)
    try:
        # A record of a front that lives is left alone.
        record_engine_processes(tmp_path, engine_name="left over", pids=[bystander.pid])
        assert psutil.pid_exists(left)
        assert end_leftovers(tmp_path, engine_name="another") == []
        assert end_leftovers(tmp_path, engine_name="left over") == [left]
        assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        assert bystander.poll() is None
        assert end_leftovers(tmp_path, engine_name="left over") == []
    finally:
        bystander.kill()
        bystander.wait()
