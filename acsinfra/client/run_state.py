"""`harvest.json`: what a harvest into a folder asked for and how far it is, kept so that it can always go on.

It is written before a job is submitted, with the Idempotency-Key that the submit will have: whenever the process ends,
the next one sends the same request again and gets the same job.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from acsinfra.client.corpus import Caps, split_corpus
from acsinfra.client.errors import AcsError, invalid_argument

FILE_NAME: Final = "harvest.json"
VERSION: Final = 1
# What a harvest asks for, of the fields of its state.
REQUEST: Final = ("model", "options", "n_prompts", "corpus_sha256")


@dataclass
class Part:
    """A piece of the corpus, `n_prompts` prompts from prompt `first` on: one Harvest job."""

    first: int
    n_prompts: int
    idempotency_key: str
    # When the submit was about to be sent; None before.
    submitted_at: float | None = None
    job_id: str | None = None
    status: str | None = None
    reserved_tokens: int | None = None
    tokens: int | None = None
    error: str | None = None
    is_downloaded: bool = False

    @property
    def folder_name(self) -> str:
        """Where its files are, below the harvest's folder."""
        return f"prompts_{self.first:09}"

    @property
    def is_waited_for(self) -> bool:
        """Whether it is a job that has not ended, as far as we know."""
        return self.job_id is not None and self.status in ("pending", "running")

    def begin_again(self) -> None:
        """Forget the job that failed: the next submit makes a new one."""
        first, n_prompts = self.first, self.n_prompts
        fresh = Part(first, n_prompts, new_key())
        for name, value in vars(fresh).items():
            setattr(self, name, value)


@dataclass
class RunState:
    """A harvest: its request, without the prompts, and its parts in the order of the corpus."""

    model: str
    options: dict[str, Any]
    n_prompts: int
    corpus_sha256: str
    parts: list[Part] = field(default_factory=list)
    version: int = VERSION

    @property
    def is_unsent(self) -> bool:
        """Whether the server has none of it: nothing was sent, or all of it was refused."""
        return all(part.job_id is None and part.submitted_at is None for part in self.parts)

    def asks_the_same_as(self, other: "RunState") -> bool:
        """Whether both are of the same request."""
        return all(getattr(self, what) == getattr(other, what) for what in REQUEST)

    def split(self, part: Part) -> None:
        """Make two parts of one that is too large for a job."""
        half = part.n_prompts // 2
        at = self.parts.index(part)
        self.parts[at : at + 1] = [
            Part(part.first, half, new_key()),
            Part(part.first + half, part.n_prompts - half, new_key()),
        ]


def new_key() -> str:
    """An Idempotency-Key that no other request has."""
    return f"acs-harvest-{uuid.uuid4()}"


def describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the state keeps them: of a tensor its shape and the hash of its bytes."""
    described = dict(options)
    if (tensor := described.get("project_onto")) is not None:
        digest = hashlib.sha256(json.dumps(tensor, sort_keys=True).encode()).hexdigest()
        described["project_onto"] = {"shape": tensor["shape"], "sha256": digest}
    result: dict[str, Any] = json.loads(json.dumps(described))
    return result


def corpus_sha256(prompts: Sequence[str]) -> str:
    """A hash of the prompts and of their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        content = prompt.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def load_state(folder: Path) -> RunState | None:
    """The state in a folder; None where there is none. Raises AcsError where it cannot be read."""
    path = folder / FILE_NAME
    try:
        raw = json.loads(path.read_bytes())
        if raw["version"] != VERSION:
            raise invalid_argument(f"{path} was written by another version of the client ({raw['version']}).")
        return RunState(**{**raw, "parts": [Part(**part) for part in raw["parts"]]})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise invalid_argument(f"{path} cannot be read: {error}") from error


def save_state(folder: Path, state: RunState) -> None:
    """Write the state: whole, or not at all, also when the machine stops."""
    path = folder / FILE_NAME
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def begin_or_continue(
    folder: Path, prompts: Sequence[str], *, model: str, options: Mapping[str, Any], caps: Caps
) -> RunState:
    """The state of this harvest, new or as an interrupted run left it.

    Another harvest in the folder gives way where the server refused all of it. Raises AcsError (`invalid_argument`)
    where it did not.
    """
    wanted = RunState(model, describe_options(options), len(prompts), corpus_sha256(prompts))
    found = load_state(folder)
    if found is None or (found.is_unsent and not found.asks_the_same_as(wanted)):
        wanted.parts = [Part(piece.start, len(piece), new_key()) for piece in split_corpus(prompts, caps)]
        save_state(folder, wanted)
        return wanted
    for what in REQUEST:
        if getattr(found, what) != getattr(wanted, what):
            words = {"corpus_sha256": "prompts", "n_prompts": "prompts"}.get(what, what)
            raise invalid_argument(
                f"{folder} holds a harvest with other {words}. Choose another folder, or give the same command again.",
                param="out",
            )
    return found


def mark_submitted(part: Part) -> None:
    """Note that the part's submit is about to be sent."""
    if part.submitted_at is None:
        part.submitted_at = time.time()


def require_fresh_submit(part: Part, *, kept_s: float) -> None:
    """Raise AcsError where a submit was sent so long ago that its key may be forgotten, and no answer was seen."""
    if part.submitted_at is not None and part.job_id is None and time.time() - part.submitted_at > kept_s:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(part.submitted_at))
        raise AcsError(
            f"Prompts {part.first} to {part.first + part.n_prompts - 1} were sent at {when}; their answer was lost. "
            "The server may not know that request any more, and sending it again could be charged twice. Look for it "
            "with `acs jobs list --harvest`, and say --resubmit to send it again.",
            code="harvest_incomplete",
        )
