"""`manage.py quickstart` as a newcomer runs it, with the tiny model in the small one's place."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from safetensors import safe_open

from acsinfra.client import open_harvest
from acsinfra.quickstart.embedded import free_port
from acsinfra.quickstart.supervisor import PROJECT

START_SECONDS = 480
# For an answer of an API that shares the machine with all the rest; a password's slow hash is part of some.
ANSWER_SECONDS = 120
# What the tests' own servers put into the environment, and a newcomer's has not.
NOT_A_NEWCOMERS = (
    *("ACSINFRA_HOME", "ALLOWED_HOSTS", "ALLOW_PLAIN_HTTP", "BROKER_URL", "DATABASE_URL", "DJANGO_SETTINGS_MODULE"),
    *("PUBLIC_URL", "SECRET_KEY", "STORAGE_URL"),
)
# What a cluster's may have: a proxy that this machine's own address must not go through, another server's PostgreSQL.
ODD_ENVIRONMENT = {"http_proxy": "http://127.0.0.1:1", "PGSSLMODE": "verify-full"}
JSON_KEYS = {
    *("base_url", "api_key", "app_url", "username", "password", "models", "completion", "job", "harvest", "shards"),
    "seconds",
}


class Run:
    """A quickstart that runs, and all that belongs to it."""

    def __init__(self, home: Path, models: Path, *options: str, port: int = 0) -> None:
        self.home = home
        self.environment = {k: v for k, v in os.environ.items() if k not in NOT_A_NEWCOMERS} | {
            "MODELS_FILE": str(models),
            **ODD_ENVIRONMENT,
        }
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "quickstart", "--home", str(home), "--port", str(port), *options],
            cwd=PROJECT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.printed = ""
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.errors.extend(stderr)

    def wait_for_line(self, text: str, seconds: float = START_SECONDS) -> str:
        """Wait until standard error has a line with `text`, and return the line."""
        deadline = time.monotonic() + seconds
        while True:
            for line in list(self.errors):
                if text in line:
                    return line
            assert self.process.poll() is None, "".join(self.errors)
            assert time.monotonic() < deadline, "".join(self.errors)
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        """Send a signal to the quickstart alone and return its status, once it has ended."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until it has ended."""
        code = self.process.wait(START_SECONDS)
        self._reader.join()
        self.printed += self.stdout.read()
        self.stdout.close()
        return code

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on this home: all but the quickstart itself write to a log in it."""
        found = []
        for process in psutil.process_iter():
            try:
                files = [file.path for file in process.open_files()]
                if any(Path(path).is_relative_to(self.home) for path in [*files, process.cwd(), *process.cmdline()]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_gone(self, seconds: float = 5) -> None:
        """Assert that nothing runs on this home, `seconds` from now at the latest.

        What was killed last, in a group whose leader has gone, needs a moment for its end on a busy machine.
        """
        deadline = time.monotonic() + seconds
        while (running := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running == []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    file = tmp_path_factory.mktemp("quickstart") / "models.toml"
    file.write_text(f'[[models]]\nname = "tiny"\nsource = "{tiny_model}"\nkv_cache_bytes = {256 * 1024**2}\n')
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart") / "home"


@pytest.fixture(scope="module")
def first(home: Path, models: Path) -> dict[str, Any]:
    """The object of `quickstart --once --json` on a fresh home."""
    run = Run(home, models, "--once", "--json")
    assert run.wait() == 0, "".join(run.errors)
    run.assert_gone()
    assert run.printed.count("\n") == 1
    report: dict[str, Any] = json.loads(run.printed)
    return report


@pytest.fixture(scope="module")
def second_run(home: Path, models: Path, first: dict[str, Any]) -> Iterator[Run]:
    """A start on the same home that serves, after one that had kill -9 of everything."""
    killed = Run(home, models, "--once")
    killed.wait_for_line("✓ API at")
    # The guardian first: then nobody ends anything in good order.
    for process in sorted(
        killed.processes(), key=lambda process: "acsinfra.quickstart.processes" not in process.cmdline()
    ):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    killed.wait()
    run = Run(home, models, "--json")
    yield run
    if run.process.poll() is None:
        run.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def second(second_run: Run) -> dict[str, Any]:
    line = second_run.stdout.readline()
    assert line, "".join(second_run.errors)
    report: dict[str, Any] = json.loads(line)
    return report


def test_the_object_has_the_keys_and_the_seconds_of_each_step(first: dict[str, Any]) -> None:
    assert set(first) == JSON_KEYS
    assert first["models"] == ["tiny"]
    assert {"database", "broker", "rows", "api", "inference", "completion", "job", "harvest", "shards"} <= set(
        first["seconds"]
    )
    assert first["seconds"]["total"] >= first["seconds"]["inference"] > 0


def test_the_completion_and_the_harvest_are_real(first: dict[str, Any]) -> None:
    assert first["completion"]["object"] == "text_completion"
    assert first["completion"]["usage"]["completion_tokens"] == 16
    assert first["job"]["status"] == "succeeded"
    assert first["job"]["status_url"] == f"/v1/completion-jobs/{first['job']['id']}"
    job = first["harvest"]
    assert job["status"] == "done"
    assert job["n_prompts"] == 32
    assert job["layers"] == [1, 2, 3]
    tensors = {name: tensor for shard in first["shards"] for name, tensor in shard["tensors"].items()}
    assert set(tensors) == {f"{kind}_{index}" for kind in ("prompt", "tokens") for index in range(32)}
    for index in range(32):
        (n_tokens,) = tensors[f"tokens_{index}"]["shape"]
        assert tensors[f"tokens_{index}"] == {"dtype": "int32", "shape": [n_tokens]}
        assert tensors[f"prompt_{index}"] == {"dtype": "float32", "shape": [3, n_tokens, 64]}
    assert sum(tensors[f"tokens_{index}"]["shape"][0] for index in range(32)) == job["tokens"]


def test_the_shards_stay_in_the_home(home: Path, first: dict[str, Any]) -> None:
    (shard,) = first["shards"]
    assert shard["key"].endswith("shard_00000.safetensors")
    with safe_open(home / "demonstration" / "shard_00000.safetensors", framework="numpy") as opened:
        assert set(opened.keys()) == set(shard["tensors"])
        assert list(opened.get_tensor("prompt_0").shape) == shard["tensors"]["prompt_0"]["shape"]


def test_a_second_start_has_a_new_key_and_password_and_keeps_the_rest(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    def status(key: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{second['base_url']}/{path}", headers=headers, timeout=ANSWER_SECONDS).status_code

    assert second["username"] == first["username"]
    assert status(first["api_key"], "models") == 401
    assert status(second["api_key"], "models") == 200
    assert sign_in(second, first["password"]) == 200
    assert sign_in(second, second["password"]) == 302
    assert status(second["api_key"], f"harvest/{first['harvest']['job_id']}") == 200


def sign_in(report: dict[str, Any], password: str) -> int:
    """Return the status of signing in: 302 to the App, or the form again."""
    with httpx.Client(timeout=ANSWER_SECONDS) as browser:
        page = browser.get(f"{report['app_url']}/sign-in")
        assert page.status_code == 200
        form = {
            "username": report["username"],
            "password": password,
            "csrfmiddlewaretoken": browser.cookies["csrftoken"],
        }
        return browser.post(f"{report['app_url']}/sign-in", data=form).status_code


def test_manage_py_in_another_shell_meets_it(home: Path, second_run: Run, second: dict[str, Any]) -> None:
    assert stat.S_IMODE((home / "env").stat().st_mode) == 0o600
    made = subprocess.run(
        [sys.executable, "manage.py", "createkey", second["username"], "--name", "another-shell"],
        cwd=PROJECT,
        env={**second_run.environment, "ACSINFRA_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    key = next(word for word in made.stdout.split() if word.startswith("sk-acs-"))
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.get(f"{second['base_url']}/models", headers=headers, timeout=ANSWER_SECONDS)
    assert answer.status_code == 200


async def test_the_openai_clients_work_unchanged(second: dict[str, Any]) -> None:
    options: dict[str, Any] = {"base_url": second["base_url"], "api_key": second["api_key"]}
    asked: dict[str, Any] = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(**options) as client:
        plain = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert [model.id for model in client.models.list()] == ["tiny"]
    async with openai.AsyncOpenAI(**options) as async_client:
        awaited = await async_client.completions.create(**asked)
        streamed = [chunk async for chunk in await async_client.completions.create(**asked, stream=True)]
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 8
    assert plain.choices[0].finish_reason == "length"
    assert awaited.choices[0].text == plain.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage


def test_the_readmes_examples_run(second: dict[str, Any], tmp_path: Path) -> None:
    """As they stand, but for the model's name and the layers that the tiny model has."""
    readme = (PROJECT / "README.md").read_text().replace("smollm2-135m", "tiny").replace("8,16,24", "0,2")
    readme = re.sub(r"\[15\]|\b16\b", lambda found: "[2]" if found[0] == "[15]" else "2", readme)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACS_API_BASE": second["base_url"],
        "ACS_API_KEY": second["api_key"],
    }
    (tmp_path / "prompts.jsonl").write_text('"The sky is blue."\n"Water is wet."\n')
    (shell,) = (block for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if block.startswith("acs harvest"))
    completion, harvest = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    commands = ([sys.executable, "-c", completion], ["bash", "-euc", shell], [sys.executable, "-c", harvest])
    printed = []
    for command in commands:
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout)
    # What curl would send; a bare machine may have no curl.
    curl = next(block for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if "curl" in block)
    for name in ("ACS_API_BASE", "ACS_API_KEY"):
        curl = curl.replace(f"${name}", env[name])
    _, url, _, key, _, content_type, _, body = shlex.split(curl[curl.index("curl") :].replace("\\\n", " "))
    headers = dict(header.split(": ", 1) for header in (key, content_type))
    curled = httpx.post(url, headers=headers, content=body, timeout=ANSWER_SECONDS).json()

    # One layer, the prompt's tokens and 7 of the 8 generated, hidden size 64.
    assert printed[0].rstrip().endswith(f"[1, {curled['usage']['prompt_tokens'] + 7}, 64]")
    assert [prompt.values.shape[0] for prompt in open_harvest(tmp_path / "harvest")] == [2, 2]


def test_a_home_that_is_in_use_is_refused(home: Path, models: Path, second: dict[str, Any]) -> None:
    run = Run(home, models, "--once")
    assert run.wait() == 1
    assert f"Another quickstart runs on {home}" in "".join(run.errors)
    assert run.printed == ""


@pytest.mark.long
def test_two_homes_run_side_by_side_and_kill_9_of_one_ends_its_children_alone(
    tmp_path: Path, models: Path, second_run: Run, second: dict[str, Any]
) -> None:
    other = Run(tmp_path / "other", models, "--once")
    other.wait_for_line("✓ API at")
    names = {process.name() for process in other.processes()}
    assert {"postgres", "valkey-server"} <= names
    other.process.kill()
    other.wait()
    other.assert_gone(seconds=30)
    headers = {"Authorization": f"Bearer {second['api_key']}"}
    answer = httpx.get(f"{second['base_url']}/models", headers=headers, timeout=ANSWER_SECONDS)
    assert answer.json()["data"][0]["status"] == "live"


def test_ctrl_c_while_it_serves_ends_every_child(home: Path, second_run: Run, second: dict[str, Any]) -> None:
    # PostgreSQL, Valkey, the API, an inference worker with its engine, a runner, the scheduler; and itself.
    assert len(second_run.processes()) >= 8
    assert second_run.end(signal.SIGINT) == 0
    second_run.assert_gone()
    assert not (home / "env").exists()


def test_a_signal_during_the_start_ends_every_child(tmp_path: Path, models: Path) -> None:
    run = Run(tmp_path / "home", models, "--once")
    run.wait_for_line("✓ API at")
    assert run.end(signal.SIGTERM) == 128 + signal.SIGTERM
    run.assert_gone()
    assert run.printed == ""


def test_a_failing_child_ends_all_and_is_named(tmp_path: Path, models: Path) -> None:
    run = Run(tmp_path / "home", models, "--once")
    run.wait_for_line("✓ Valkey started")
    (valkey,) = (process for process in run.processes() if process.name() == "valkey-server")
    valkey.kill()
    assert run.wait() == 1
    assert "CommandError: valkey was killed by signal 9." in "".join(run.errors)
    run.assert_gone()


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path, models: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        port = server.getsockname()[1]
        run = Run(tmp_path / "home", models, "--once", port=port)
        assert run.wait() == 1
    assert f"Port {port} on 127.0.0.1 can't be used" in "".join(run.errors)
    assert not (tmp_path / "home").exists()


def test_a_checkpoint_that_cannot_be_had_is_a_clear_error(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[[models]]\nname = "lost"\nsource = "/no/such/folder"\n')
    run = Run(tmp_path / "home", models, "--once")
    assert run.wait() == 1
    assert "The checkpoint of lost can't be had" in "".join(run.errors)
    assert "Traceback" not in "".join(run.errors)
    run.assert_gone()
