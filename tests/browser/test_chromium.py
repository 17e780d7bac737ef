"""Which browser the tests take: one that is named, one that is here, Playwright's own, Debian's; else what to do."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import chromium
from tests.browser.chromium import NoBrowserError, find_chromium

# Nothing listens there: a download is refused at once.
NO_HOST = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the one folder of the PATH, empty but for what Playwright's own command needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "env"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "playwright"))
    monkeypatch.setenv("PLAYWRIGHT_DOWNLOAD_HOST", NO_HOST)
    monkeypatch.delenv("CHROMIUM", raising=False)
    return folder


def program(path: Path, *, prints: str = "", status: int = 0) -> str:
    """Write a program that prints a line and ends with a status; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_one_that_is_named_comes_before_the_one_that_is_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(here / "chromium", prints="Chromium 1")
    named = program(tmp_path / "mine", prints="Google Chrome 2")
    monkeypatch.setenv("CHROMIUM", named)
    assert find_chromium() == named


@pytest.mark.parametrize("named", ["/nowhere/chromium", "broken"])
def test_one_that_is_named_and_does_not_start_is_a_failure_whatever_else_is_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    program(here / "chromium", prints="Chromium 1")
    program(here / "broken", status=127)
    monkeypatch.setenv("CHROMIUM", named)
    with pytest.raises(NoBrowserError, match=f"CHROMIUM is set to '{named}', which does not start"):
        find_chromium()


def test_of_those_that_are_here_the_first_that_starts_is_taken(here: Path) -> None:
    program(here / "chromium", status=1)
    program(here / "chromium-browser", prints="command not found: install the snap")
    chrome = program(here / "google-chrome", prints="Google Chrome 3")
    assert find_chromium() == chrome


def test_playwrights_download_comes_before_debians_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "playwright"
    program(folder / "chromium_headless_shell-9" / "linux" / "headless_shell", status=127)
    downloaded = program(folder / "chromium_headless_shell-8" / "linux" / "headless_shell", prints="Chromium 4")
    monkeypatch.setattr(chromium, "_playwrights_own", lambda: chromium._downloaded())
    assert find_chromium() == downloaded


def test_debians_package_is_the_last_way(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = here / "chromium"

    def refused() -> Iterator[str]:
        raise OSError("no download")

    def install() -> Iterator[str]:
        yield program(installed, prints="Chromium 5")

    monkeypatch.setattr(chromium, "_playwrights_own", refused)
    monkeypatch.setattr(chromium, "_debians", install)
    assert find_chromium() == str(installed)


def test_without_any_the_failure_says_why_and_what_to_do(here: Path) -> None:
    """Playwright's download is refused, as it would be, and apt-get too."""
    program(here / "apt-get", prints="E: Unable to fetch some archives", status=100)
    with pytest.raises(NoBrowserError) as failure:
        find_chromium()
    said = str(failure.value)
    assert "playwright install --only-shell: Error: connect ECONNREFUSED 127.0.0.1:1" in said
    if chromium._may_install():
        assert "apt-get update -qq: E: Unable to fetch some archives" in said
    assert "set CHROMIUM to the path of one" in said
    assert "uv run playwright install --with-deps chromium" in said
