"""The process around a runner's: another takes the place of one that dies, and all end together."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from acsinfra.quickstart.supervisor import PROJECT

# The first dies of a signal, the second with its engine; the third goes on until it is told to stop.
RUNNER = """
import os, signal, sys, time
from harvest.runner.lives import ENGINE_FAILED, begin_life
life = begin_life(n_prompts=8)
held = life.in_flight.indexes()
print("life", os.getpid(), life.pid, life.owner, life.has_died, held, flush=True)
if not held:
    for index in (1, 3, 7):
        life.in_flight.add(index)
    life.in_flight.remove(3)
    os.kill(os.getpid(), signal.SIGKILL)
if held == (1, 7):
    life.in_flight.clear()
    life.in_flight.add(2)
    os._exit(ENGINE_FAILED)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("runs", flush=True)
time.sleep(60)
"""


@pytest.fixture
def runner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", RUNNER], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def read_lives(runner: subprocess.Popen[str]) -> list[list[str]]:
    """Read what the three processes said of themselves, when the third runs."""
    assert runner.stdout is not None
    lines = iter(runner.stdout.readline, "runs\n")
    return [line.split(maxsplit=5)[1:] for line in lines if line.startswith("life ")]


def test_what_the_engine_held_is_known_to_the_next_process_and_the_last_exit_code_is_the_runners(
    runner: subprocess.Popen[str],
) -> None:
    first, second, third = read_lives(runner)
    assert len({first[0], second[0], third[0], str(runner.pid)}) == 4
    assert first[1] == second[1] == third[1] == str(runner.pid)
    assert first[2] == second[2] == third[2]
    assert (first[3:], second[3:], third[3:]) == (["False", "()\n"], ["True", "(1, 7)\n"], ["True", "(2,)\n"])
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(10) == 5


def test_a_runner_that_is_killed_takes_its_process_along(runner: subprocess.Popen[str]) -> None:
    child = psutil.Process(int(read_lives(runner)[2][0]))
    runner.kill()
    runner.wait(10)
    assert psutil.wait_procs([child], timeout=10)[0] == [child]
