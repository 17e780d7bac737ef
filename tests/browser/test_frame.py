"""The frame around every page: navigation, theme, copying, by mouse and by keyboard."""

from playwright.sync_api import Page, expect

from tests.browser.accessibility import assert_accessible
from tests.browser.people import Person, sign_in


def test_a_person_signs_in_sees_the_pages_and_signs_out(page: Page, person: Person) -> None:
    page.goto("/app")
    assert_accessible(page)
    sign_in(page, person)
    assert_accessible(page)
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    expect(links).to_have_text(["Jobs", "Keys", "Usage", "Workbench", "Docs"])
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(links).to_have_text(["Docs"])


def test_the_theme_is_switched_and_stays(page: Page) -> None:
    page.goto("/app/sign-in")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light


def test_the_keyboard_reaches_the_content_first(page: Page, person: Person) -> None:
    sign_in(page, person)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
