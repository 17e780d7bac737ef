"""axe-core over a page, light and dark."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SERIOUS = {"serious", "critical"}
PHONE_WIDTH = 390


def assert_accessible(page: Page) -> None:
    """Assert that axe finds nothing serious on the page, light and dark, and that a phone shows it without scrolling
    sideways.
    """
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page).response["violations"]
        serious = [
            f"{violation['id']}: {node['html'][:200]} {node['failureSummary']}"
            for violation in found
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
