"""The reference and the guides in a browser: under the strict Content-Security-Policy, with nothing from elsewhere."""

import re

import pytest
from playwright.sync_api import Page, expect

from acsinfra.guides import SLUGS
from tests.browser.accessibility import assert_accessible


def test_the_reference_shows_each_route_with_its_fields_and_errors(page: Page) -> None:
    page.goto("/docs")
    operations = page.locator(".opblock-summary-path")
    expect(operations).to_have_count(count_operations(page))
    page.get_by_text("/v1/budget").first.click()
    expect(page.get_by_text("invalid_api_key").last).to_be_visible()

    def follows(scheme: str) -> None:
        is_dark = re.compile(r"\bdark-mode\b")
        html = expect(page.locator("html"))
        if scheme == "dark":
            html.to_have_class(is_dark)
        else:
            html.not_to_have_class(is_dark)

    assert_accessible(page, follows=follows)


def count_operations(page: Page) -> int:
    """How many the document has."""
    paths = page.request.get("/openapi.json").json()["paths"]
    return sum(method in {"get", "post", "put", "patch", "delete"} for path in paths.values() for method in path)


def test_one_goes_from_the_guides_to_each_and_on_to_the_next(page: Page) -> None:
    page.goto("/docs")
    page.get_by_role("link", name="Guides", exact=True).click()
    page.wait_for_url("**/docs/guide")
    assert_accessible(page)
    page.get_by_role("link", name="Set up", exact=True).click()
    page.wait_for_url(f"**/docs/guide/{SLUGS[0]}")
    for slug in SLUGS[1:]:
        page.locator(".next a").last.click()
        page.wait_for_url(f"**/docs/guide/{slug}")
    expect(page.get_by_role("heading", level=1)).to_have_text("Run your own")


@pytest.mark.parametrize("slug", ["errors", "steering"])
def test_a_guide_is_accessible_and_fits_a_phone(page: Page, slug: str) -> None:
    page.goto(f"/docs/guide/{slug}")
    assert_accessible(page)


def test_a_block_of_code_is_copied(page: Page) -> None:
    page.goto("/docs/guide/set-up")
    page.get_by_role("button", name="Copy the code").first.click()
    expect(page.get_by_role("button", name="Copy the code").first).to_have_text("Copied")
    assert "ACS_API_BASE" in page.evaluate("navigator.clipboard.readText()")
