"""The account's pages, for those who have one and those who have none yet."""

from playwright.sync_api import Page, expect

from tests.browser.accessibility import assert_accessible
from tests.browser.people import Person, sign_in
from tests.stack import Stack

INVITE = """
from accounts.invitations import create_invitation, invitation_path
result = invitation_path(create_invitation(made_by=None, email="somebody@example.org")[1])
"""


def test_the_account_s_pages_are_for_everybody(page: Page, person: Person, api: Stack) -> None:
    for path in ("/app/password/reset", "/app/password/reset/sent", "/app/invitation/none", "/app/none"):
        page.goto(path)
        assert_accessible(page)
    page.goto(api.django(INVITE))
    assert_accessible(page)
    sign_in(page, person, to="/app/account")
    expect(page.get_by_text("this one")).to_be_visible()
    assert_accessible(page)
    page.get_by_role("link", name="Change the password").click()
    page.wait_for_url("**/app/password")
    page.get_by_role("button", name="Change the password").click()
    assert_accessible(page)
