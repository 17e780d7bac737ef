"""The client of the benchmarks, against the running API."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.benchmarks.http_load import Load
from tests.benchmarks.parts import BenchFailed, Helper
from tests.stack import Stack

UNKNOWN_MODEL = json.dumps({"model": "nobody", "prompt": "a", "max_tokens": 1})


@pytest.fixture(scope="module")
def client(api: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    helper = Helper("client", "tests.benchmarks.http_load", env=api.env, logs=tmp_path_factory.mktemp("logs"))
    yield helper
    helper.close()


def load(api: Stack, **changes: object) -> Load:
    # Every step of a Completion but the engine's: the model is not there.
    usual = Load(
        port=api.port,
        path="/v1/completions",
        keys=[api.user.key],
        bodies=[UNKNOWN_MODEL],
        clients=4,
        requests=20,
        status=400,
    )
    return msgspec.structs.replace(usual, **changes)


def test_each_answer_is_timed_once(api: Stack, client: Helper) -> None:
    outcome = client.ask(load(api))
    assert len(outcome.latencies) == len(outcome.ended_at) == 20
    assert outcome.ended_at == sorted(outcome.ended_at)
    assert min(outcome.latencies) > 0
    assert outcome.cpu_seconds > 0
    # More clients than requests.
    assert len(client.ask(load(api, clients=8, requests=3)).latencies) == 3


def test_another_status_ends_the_load_with_what_the_answer_said(api: Stack, client: Helper) -> None:
    with pytest.raises(BenchFailed, match=r"status 400.*model_not_found"):
        client.ask(load(api, status=200))
    # And the client goes on.
    assert len(client.ask(load(api)).latencies) == 20


def test_a_server_that_is_not_there_ends_the_load(api: Stack, client: Helper) -> None:
    with pytest.raises(BenchFailed, match="ConnectionRefusedError"):
        client.ask(load(api, port=1))


def test_a_helper_that_ends_says_why(tmp_path: Path) -> None:
    helper = Helper("broken", "tests.benchmarks.nothing", env={"PATH": str(Path(sys.executable).parent)}, logs=tmp_path)
    with pytest.raises(BenchFailed, match=r"broken ended by itself:\n.*No module named"):
        helper.ask(Load(port=1, path="", keys=[], bodies=[], clients=1, requests=1))
    helper.close()
