"""What a harvest does before any server answers: its folder, its state, its bars."""

import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from acsinfra.client import AcsError, Client
from acsinfra.client.cli.options import read_layers, read_tensor
from acsinfra.client.cli.progress import ProgressBars
from acsinfra.client.corpus import Caps
from acsinfra.client.harvesting import HarvestRun
from acsinfra.client.models import HarvestJob
from acsinfra.client.run_state import RunState, begin_or_continue, load_state, save_state

PROMPTS = ["one", "two", "three"]


@pytest.fixture
def client() -> Client:
    """Return a client of a port where nobody listens."""
    return Client("http://127.0.0.1:1", "sk-acs-none", patience_s=0)


def begin(folder: Path, **changes: Any) -> RunState:
    fields: dict[str, Any] = {"prompts": PROMPTS, "model": "tiny", "options": {"layers": [1]}, "caps": Caps(prompts=2)}
    fields.update(changes)
    return begin_or_continue(folder, fields.pop("prompts"), **fields)


def run(client: Client, folder: Path, **options: Any) -> RunState:
    return HarvestRun(
        client, PROMPTS, folder, model="tiny", options={"layers": [1]}, job_size=2, patience_s=0, **options
    ).run()


def test_the_state_is_read_as_it_was_written_and_only_for_the_same_harvest(tmp_path: Path) -> None:
    state = begin(tmp_path)
    assert [(part.first, part.n_prompts) for part in state.parts] == [(0, 2), (2, 1)]
    assert len({part.idempotency_key for part in state.parts}) == 2
    assert begin(tmp_path, caps=Caps()) == state == load_state(tmp_path)
    state.parts[0].submitted_at = time.time()
    save_state(tmp_path, state)
    others: list[dict[str, Any]] = [
        {"prompts": [*PROMPTS, "four"]},
        {"prompts": PROMPTS[::-1]},
        {"model": "x"},
        {"options": {}},
    ]
    for changes in others:
        with pytest.raises(AcsError, match="holds a harvest with other"):
            begin(tmp_path, **changes)
    for broken in (b"", b"{", b"[]", b'{"version": 9}', b'{"version": 1, "parts": [{}]}'):
        (tmp_path / "harvest.json").write_bytes(broken)
        with pytest.raises(AcsError) as refused:
            begin(tmp_path)
        assert refused.value.code == "invalid_argument"


def test_a_harvest_that_the_server_has_none_of_gives_way_to_another(tmp_path: Path) -> None:
    refused = begin(tmp_path, options={"layers": [99]})
    state = begin(tmp_path)
    assert (state.options, state.is_unsent) == ({"layers": [1]}, True)
    assert state.parts[0].idempotency_key != refused.parts[0].idempotency_key
    assert load_state(tmp_path) == state


@pytest.mark.parametrize("text", ["3-1", "0-1000000000", "10000", "1,", "-1", "a"])
def test_layers_that_are_none_are_refused_before_a_list_is_made(text: str) -> None:
    with pytest.raises(AcsError) as refused:
        read_layers(text)
    assert (refused.value.code, refused.value.param) == ("invalid_argument", "layers")


def test_a_directions_file_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.npy"):
        (tmp_path / name).write_bytes(b"not a tensor")
        with pytest.raises(AcsError) as refused:
            read_tensor(str(tmp_path / name))
        assert refused.value.code == "invalid_argument"


def test_one_text_is_not_a_corpus_of_its_letters(client: Client, tmp_path: Path) -> None:
    with pytest.raises(AcsError) as refused:
        client.harvest("hello", tmp_path, model="tiny")
    assert (refused.value.code, refused.value.param) == ("invalid_argument", "prompts")
    assert not list(tmp_path.iterdir())


def test_a_submit_whose_answer_never_came_has_the_same_key_again(client: Client, tmp_path: Path) -> None:
    with pytest.raises(AcsError) as refused:
        run(client, tmp_path)
    assert refused.value.code == "connection_failed"
    first = load_state(tmp_path)
    assert first is not None
    assert (first.parts[0].submitted_at is None, first.parts[1].submitted_at) == (False, None)
    with pytest.raises(AcsError):
        run(client, tmp_path)
    assert load_state(tmp_path) == first
    # A day later the server may have forgotten the key: it is the user's word that counts.
    first.parts[0].submitted_at = time.time() - 24 * 3600
    save_state(tmp_path, first)
    with pytest.raises(AcsError, match="could be charged twice") as doubtful:
        run(client, tmp_path)
    assert doubtful.value.code == "harvest_incomplete"
    with pytest.raises(AcsError) as refused:
        run(client, tmp_path, resubmit=True)
    assert refused.value.code == "connection_failed"


def test_one_process_at_a_time_harvests_into_a_folder(client: Client, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".harvest.lock"), pytest.raises(AcsError, match="Another process"):
        run(client, tmp_path)


def test_the_bars_add_up(tmp_path: Path) -> None:
    state = begin(tmp_path)
    job = {"job_id": "1", "model": "tiny", "n_prompts": 2, "reserved_tokens": 8, "tokens": 7, "layers": [1]}
    with ProgressBars() as bars:
        bars.planned(state)
        state.parts[0].status = "done"
        bars.job_changed(state.parts[0], HarvestJob.from_json({**job, "status": "done"}))
        bars.job_changed(state.parts[1], HarvestJob.from_json({**job, "status": "running", "progress": {"prompts": 1}}))
        bars.bytes_planned(10_000_000)
        bars.bytes_arrived(4_000_000)
        bars.bytes_arrived(-1_000_000)
        bars.said("a line")
        shown = [(task.completed, task.total) for task in bars.tasks]
    assert shown == [(1, 2), (3, 3), (3, 10)]
