"""axe-core over a page, light and dark, and the width of a phone."""

from collections.abc import Callable
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SERIOUS = {"serious", "critical"}
PHONE_WIDTH = 390
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_AXE = Axe().axe_script
_RUN = "rules => axe.run(document, {resultTypes: ['violations'], ...rules}).then(found => found.violations)"
# What the other scheme changes.
_COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}


def assert_accessible(page: Page, *, follows: Callable[[str], None] = lambda scheme: None) -> None:
    """Assert that axe finds nothing serious, light and dark, and that a phone shows the page without scrolling
    sideways.

    `follows` waits until the page has followed a change of scheme, where a script of its own has to.
    """
    # A click returns as soon as the next page begins to come.
    page.wait_for_load_state("load")
    page.evaluate(_AXE)
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        follows(scheme)
        serious = [
            f"{violation['id']}: {node['html'][:200]} {node['failureSummary']}"
            for violation in page.evaluate(_RUN, {} if scheme == SCHEMES[0] else _COLOURS)
            if violation["impact"] in SERIOUS
            for node in violation["nodes"]
        ]
        assert not serious, f"{page.url}, {scheme}:\n" + "\n".join(serious)
    page.emulate_media(color_scheme="light")
    before = page.viewport_size
    page.set_viewport_size({"width": PHONE_WIDTH, "height": 844})
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE_WIDTH, f"{page.url} is {width} pixels wide on a phone"
    if before:
        page.set_viewport_size(before)
