"""Finds a Chromium for the browser tests, or gets one: the machine's, Playwright's own download, Debian's package."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DOWNLOAD_SECONDS = 300
INSTALL_SECONDS = 600

NO_BROWSER = """The browser tests need a Chromium, and none is here nor could be installed:
{faults}
Do one of these, then run the tests again:
- install one (`apt-get install chromium`), or set CHROMIUM to the path of one;
- `uv run playwright install --with-deps chromium`."""


class NoBrowserError(Exception):
    """There is no Chromium, and none could be installed; the text says what to do."""


def find_chromium() -> str:
    """The path of a Chromium that starts; gets one where none is here. Raises NoBrowserError."""
    named = os.environ.get("CHROMIUM")
    if named:
        path = shutil.which(named)
        if path is None or not _starts(path):
            raise NoBrowserError(f"CHROMIUM is set to {named!r}, which does not start as a browser.")
        return path
    for path in filter(None, map(shutil.which, NAMES)):
        if _starts(path):
            return path
    faults: list[str] = []
    ways: tuple[Callable[[], Iterator[str]], ...] = (_playwrights_own, _debians)
    for way in ways:
        try:
            for path in way():
                if _starts(path):
                    return path
                faults.append(f"- {path} is there and does not start.")
        except (subprocess.SubprocessError, OSError) as error:
            faults.append(f"- {error}")
    raise NoBrowserError(NO_BROWSER.format(faults="\n".join(faults)))


def _starts(path: str) -> bool:
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (subprocess.SubprocessError, OSError):
        return False
    return result.returncode == 0 and "Chrom" in result.stdout


def _playwrights_own() -> Iterator[str]:
    """Playwright's download, as it is, and again with the system libraries that a root may install."""
    _run(sys.executable, "-m", "playwright", "install", "--only-shell", "chromium", seconds=DOWNLOAD_SECONDS)
    yield from _downloaded()
    if _may_install():
        _run(sys.executable, "-m", "playwright", "install-deps", "chromium", seconds=INSTALL_SECONDS)
        yield from _downloaded()


def _downloaded() -> Iterator[str]:
    named = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    folder = Path(named) if named else Path.home() / ".cache" / "ms-playwright"
    for pattern in ("chromium_headless_shell-*/*/*headless*shell*", "chromium-*/*/chrome"):
        yield from (str(path) for path in sorted(folder.glob(pattern), reverse=True) if os.access(path, os.X_OK))


def _debians() -> Iterator[str]:
    """Debian's package, and a font to draw with."""
    if not _may_install():
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run("apt-get", "update", "-qq", seconds=INSTALL_SECONDS, environment=environment)
    install = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core")
    _run(*install, seconds=INSTALL_SECONDS, environment=environment)
    yield from filter(None, map(shutil.which, NAMES))


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _run(*command: str, seconds: float, environment: dict[str, str] | None = None) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command[:5])}: {_told(result.stderr or result.stdout)}")


def _told(output: str) -> str:
    """The line that says what went wrong: Playwright prints a stack after it, apt's begins with E."""
    lines = output.strip().splitlines() or ["it failed"]
    errors = [line for line in lines if line.startswith(("Error: ", "E: "))]
    return (errors or lines)[-1]
