"""The main job once, over the HTTP API as anyone would use it: a Completion, a Job, a Harvest job and its shards.

Shards are read by safetensors itself, without torch: NumPy has no bfloat16, so its bits are looked at.
"""

import hashlib
import math
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from safetensors import SafetensorError, deserialize
from tokenizers import Tokenizer

PROMPT: Final = "The capital of France is"
SHORT_PROMPTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Interpretability research reads the residual stream.",
)
TEXTS: Final = Path(__file__).with_name("texts.txt")
DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32", "I64": "int64"}
# Where a float's exponent is all ones it is infinite or no number.
EXPONENTS: Final = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
WAIT_SECONDS: Final = 5

Note = Callable[[str], None]


# What an operator may have decided since the last start: no fault of the installation.
OPERATORS_CODES: Final = frozenset(
    {"budget_exceeded", "harvest_quota_exceeded", "harvest_unsupported", "model_not_found", "spend_cap"}
)


class DemonstrationFailed(Exception):
    """The API did not do what it promises; the message says what was seen."""


class DemonstrationRefused(Exception):
    """The API refused it as an operator decided: a pause, a limit, a model that is off. The message is its own."""


def demonstration_prompts() -> list[str]:
    """Return two short prompts and the project's thirty longer texts."""
    return [*SHORT_PROMPTS, *TEXTS.read_text(encoding="utf-8").strip().split("\n\n")]


@dataclass(frozen=True)
class Shard:
    """A shard that was downloaded and checked; `tensors` maps each name to its dtype and shape."""

    key: str
    file: Path
    tensors: dict[str, dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """What `--json` shows of it."""
        return {"key": self.key, "tensors": self.tensors}


class Demonstration:
    """One run against a served model. `check` is called while something is awaited, and raises to end the wait."""

    def __init__(self, *, base_url: str, api_key: str, model: str, check: Callable[[], None]) -> None:
        self.model = model
        self._check = check
        self._client = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=WAIT_SECONDS + 600,
            trust_env=False,
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def wait_for_inference(self, note: Note) -> dict[str, Any]:
        """Wait until an engine serves the model, and return the model's object."""
        while True:
            self._check()
            found = self._json(self._client.get(f"/models/{self.model}"))
            if found["status"] == "live":
                return found
            note(found["status"])
            time.sleep(0.2)

    def complete(self) -> dict[str, Any]:
        """Return the answer to `The capital of France is`, greedily."""
        return self._json(self._client.post("/completions", json=self._completion))

    def run_job(self, note: Note) -> dict[str, Any]:
        """Run the same Completion as a Job, and return the Job once its result was fetched.

        Raises DemonstrationFailed when it ends otherwise than succeeded, or its result is no Completion.
        """
        key = {"Idempotency-Key": secrets.token_hex(16)}
        job = self._json(self._client.post("/completion-jobs", json=self._completion, headers=key), status=202)
        while job["status"] in ("queued", "running"):
            self._check()
            note(job["status"])
            time.sleep(0.1)
            job = self._json(self._client.get(f"/completion-jobs/{job['id']}"))
        result = self._json(self._client.get(f"/completion-jobs/{job['id']}/result"))
        if job["status"] != "succeeded" or not result["choices"]:
            raise DemonstrationFailed(f"The Job ended as {job['status']}: {result}")
        return job

    @property
    def _completion(self) -> dict[str, Any]:
        return {"model": self.model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}

    def submit_harvest(self) -> dict[str, Any]:
        """Submit a Harvest job over the demonstration's prompts, at the default layers."""
        body = {"model": self.model, "prompts": demonstration_prompts()}
        return self._json(self._client.post("/harvest", json=body), status=202)

    def wait_for_harvest(self, job: dict[str, Any], note: Note) -> dict[str, Any]:
        """Return the finished job. Raises DemonstrationFailed when it ends otherwise than done."""
        while job["status"] in ("pending", "running"):
            self._check()
            progress = job.get("progress", {})
            note(f"{job['status']}, {progress.get('prompts', 0)} of {job['n_prompts']} prompts")
            job = self._json(self._client.get(f"/harvest/{job['job_id']}", params={"wait": WAIT_SECONDS}))
        if job["status"] != "done":
            raise DemonstrationFailed(f"The Harvest job ended as {job['status']}: {job.get('error')}")
        return job

    def read_shards(
        self, job: dict[str, Any], *, tokenizer: Tokenizer, context: int, hidden_size: int, folder: Path
    ) -> list[Shard]:
        """Download the job's shards to `folder`, by their links alone, and check every tensor in them.

        For prompt i, `tokens_{i}` must be the ids that the tokenizer gives (at most context - 1), and `prompt_{i}` a
        finite [layers, tokens, hidden]. Raises DemonstrationFailed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        result = job["result"]
        manifest = self._json(self._follow(result["manifest_url"]))
        (folder / "stats.safetensors").write_bytes(self._download(result["stats_url"]))
        shards, seen = [], 0
        for described, url in zip(manifest["shards"], result["shard_urls"], strict=True):
            content = self._download(url)
            if hashlib.sha256(content).hexdigest() != described["sha256"]:
                raise DemonstrationFailed(f"{described['key']} does not have the SHA-256 that the manifest says.")
            file = folder / Path(described["key"]).name
            file.write_bytes(content)
            tensors = _open(content, described["key"])
            seen += _check_tensors(
                tensors,
                prompts=demonstration_prompts(),
                tokenizer=tokenizer,
                context=context,
                n_layers=len(result["layer_indices"]),
                hidden_size=hidden_size,
            )
            described_tensors = {
                name: {"dtype": DTYPES[str(tensor["dtype"])], "shape": list(tensor["shape"])}
                for name, tensor in sorted(tensors.items(), key=lambda item: _order(item[0]))
            }
            shards.append(Shard(described["key"], file, described_tensors))
        if seen != job["n_prompts"]:
            raise DemonstrationFailed(f"The shards hold {seen} prompts of {job['n_prompts']}.")
        return shards

    def _download(self, url: str) -> bytes:
        answer = self._follow(url)
        if answer.status_code != 200:
            raise DemonstrationFailed(f"A link of the result answered {answer.status_code}: {answer.text[:300]}")
        return answer.content

    def _follow(self, url: str) -> httpx.Response:
        # Not by the client: a link needs no key. No proxy reaches this machine's own address, but S3 may need one.
        return httpx.get(url, timeout=600, trust_env=httpx.URL(url).port != self._client.base_url.port)

    def _json(self, answer: httpx.Response, *, status: int = 200) -> dict[str, Any]:
        if answer.status_code != status:
            is_json = answer.headers.get("Content-Type", "").startswith("application/json")
            error = answer.json()["error"] if is_json else {}
            if error.get("code") in OPERATORS_CODES:
                raise DemonstrationRefused(error["message"])
            raise DemonstrationFailed(
                f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {answer.text[:500]}"
            )
        body: dict[str, Any] = answer.json()
        return body


def _open(content: bytes, key: str) -> dict[str, dict[str, Any]]:
    try:
        return dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise DemonstrationFailed(f"{key} is no safetensors file: {error}") from error


def _order(name: str) -> tuple[int, str]:
    kind, _, index = name.rpartition("_")
    return int(index), kind


def _check_tensors(
    tensors: dict[str, dict[str, Any]],
    *,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    context: int,
    n_layers: int,
    hidden_size: int,
) -> int:
    """Check a shard against its prompts and return how many it has."""
    indexes = sorted(int(name.removeprefix("tokens_")) for name in tensors if name.startswith("tokens_"))
    if set(tensors) != {f"{kind}_{index}" for index in indexes for kind in ("prompt", "tokens")}:
        raise DemonstrationFailed(f"A shard holds other tensors than its prompts': {sorted(tensors)}")
    for index in indexes:
        expected = tokenizer.encode(prompts[index]).ids[: context - 1]
        ids = tensors[f"tokens_{index}"]
        if ids["dtype"] != "I32" or struct.unpack(f"<{len(expected)}i", ids["data"]) != tuple(expected):
            raise DemonstrationFailed(f"tokens_{index} are not the ids of prompt {index}.")
        stream = tensors[f"prompt_{index}"]
        if list(stream["shape"]) != [n_layers, len(expected), hidden_size]:
            raise DemonstrationFailed(f"prompt_{index} has the shape {stream['shape']}.")
        if not _is_finite(stream):
            raise DemonstrationFailed(f"prompt_{index} has values that are not finite.")
    return len(indexes)


def _is_finite(tensor: dict[str, Any]) -> bool:
    bits_dtype, exponent = EXPONENTS[str(tensor["dtype"])]
    bits = np.frombuffer(tensor["data"], dtype=bits_dtype)
    return bits.size == math.prod(tensor["shape"]) and not bool(np.any(bits & exponent == exponent))
