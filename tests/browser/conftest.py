"""A real browser on the real stack: `page` is a fresh window, `person` somebody who can sign in.

Playwright's synchronous API leaves an event loop running in the thread that uses it, where neither Django's ORM nor
asynchronous tests would work any more. So the browser lives in a thread of its own, where the tests that use it run.
"""

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

from tests.browser.chromium import NoBrowserError, find_chromium
from tests.browser.people import Person, new_person
from tests.stack import Stack

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
# Nothing waits so long but where it fails: pages and their scripts take their time on a busy machine.
WAIT_MS = 60_000
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def browser_thread() -> Iterator[ThreadPoolExecutor]:
    """Return the one thread that talks to the browser."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser") as thread:
        yield thread


@pytest.fixture(scope="session")
def browser(browser_thread: ThreadPoolExecutor) -> Iterator[Browser]:
    """Return a Chromium; no browser is a failure that says what to do."""
    try:
        path = find_chromium()
    except NoBrowserError as error:
        pytest.fail(str(error), pytrace=False)
    playwright = browser_thread.submit(sync_playwright().start).result()
    # Chromium's sandbox does not start as root, nor in most containers; the pages are ours.
    browser = browser_thread.submit(playwright.chromium.launch, executable_path=path).result()
    yield browser
    browser_thread.submit(browser.close).result()
    browser_thread.submit(playwright.stop).result()


@pytest.fixture
def context(browser: Browser, browser_thread: ThreadPoolExecutor, api: Stack) -> Iterator[BrowserContext]:
    """Return a browser's profile of its own, 1280 pixels wide, with the stack's address as its base."""

    def open_context() -> BrowserContext:
        context = browser.new_context(base_url=api.base_url, viewport=DESKTOP, reduced_motion="reduce")
        context.set_default_timeout(WAIT_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=api.base_url)
        return context

    context = browser_thread.submit(open_context).result()
    yield context
    browser_thread.submit(context.close).result()


@pytest.fixture
def page(context: BrowserContext, browser_thread: ThreadPoolExecutor, api: Stack) -> Iterator[Page]:
    """Return a window, signed out. The test fails at its end if the page had a fault, or loaded from elsewhere."""
    faults: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # A page that answers 4xx is an answer here, not a fault of the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def open_page() -> Page:
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: _note_elsewhere(faults, api, request.url))
        return page

    yield browser_thread.submit(open_page).result()
    assert not faults


def _note_elsewhere(faults: list[str], api: Stack, url: str) -> None:
    if not url.startswith((f"{api.base_url}/", "data:", "blob:")):
        faults.append(f"a request to {url}")


@pytest.fixture
def person(api: Stack) -> Person:
    """Return a new User of the stack who can sign in, with a key."""
    return new_person(api)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that uses the browser in the browser's thread."""
    if "browser" not in pyfuncitem.fixturenames:
        return None
    thread = cast("ThreadPoolExecutor", pyfuncitem.funcargs["browser_thread"])
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    test: Callable[..., object] = pyfuncitem.obj
    thread.submit(contextvars.copy_context().run, lambda: test(**arguments)).result()
    return True
