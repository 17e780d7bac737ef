"""The admin in a browser: every page under the Content-Security-Policy, and the pause that a client sees."""

from playwright.sync_api import Page, expect

from tests.browser.accessibility import assert_accessible
from tests.browser.people import Person, new_person, sign_in
from tests.stack import Stack

PAGES = (
    "",
    "accounts/user/",
    "accounts/user/add/",
    "accounts/user/{person}/change/",
    "accounts/user/{person}/password/",
    "accounts/user/{person}/history/",
    "accounts/user/{person}/delete/",
    "accounts/apikey/",
    "accounts/apikey/add/",
    "inference/basemodel/",
    "inference/basemodel/add/",
    "inference/engine/",
    "jobs/completionjob/",
    "harvest/harvestjob/",
    "budgets/hold/",
    "budgets/ledgerentry/",
    "budgets/budget/",
    "budgets/gputime/",
    "budgets/spendlimit/",
    "admin/logentry/",
    "password_change/",
    "dashboard/",
)
# Each shows what others only repeat; the rest are loaded, so that the policy would block what it does not allow.
LOOKED_AT_CLOSELY = {"accounts/user/", "accounts/user/{person}/change/", "accounts/apikey/add/", "dashboard/"}


def test_every_page_of_the_admin_works_under_the_policy_and_is_accessible(
    page: Page, api: Stack, person: Person
) -> None:
    sign_in(page, new_person(api, is_operator=True), to="/admin/")
    for path in PAGES:
        answer = page.goto(f"/admin/{path.format(person=person.id)}")
        assert answer is not None
        assert answer.status == 200, path
        if path in LOOKED_AT_CLOSELY:
            assert_accessible(page)
    # The dashboard renews itself: once the operator is signed out, to a sign-in that is a page, not a part of this one.
    page.context.clear_cookies()
    page.evaluate("htmx.ajax('GET', location.pathname, '#now')")
    page.wait_for_url("**/app/sign-in?next=/admin/dashboard/")


def test_a_key_s_user_is_chosen_from_a_searched_list(page: Page, api: Stack, person: Person) -> None:
    sign_in(page, new_person(api, is_operator=True), to="/admin/accounts/apikey/add/")
    page.locator(".select2-selection").click()
    page.locator(".select2-search__field").fill(person.username)
    page.get_by_role("option", name=person.username, exact=True).click()
    page.get_by_label("Name:").fill("made by an operator")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("The key, shown this once: sk-acs-")).to_be_visible()


def test_a_client_sees_the_pause_of_an_operator(page: Page, inference_stack: Stack) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    sign_in(page, new_person(inference_stack, is_operator=True), to="/admin/")

    def switch(*, paused: bool) -> None:
        page.goto("/admin/budgets/spendlimit/")
        page.get_by_label("Is paused").set_checked(paused)
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator(".messagelist .success")).to_be_visible()

    with inference_stack.client() as client:
        try:
            switch(paused=True)
            answer = client.post("completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "spend_cap")
            assert answer.headers["x-should-retry"] == "false"
        finally:
            switch(paused=False)
        assert client.post("completions", json=body).status_code == 200
    page.goto("/admin/admin/logentry/")
    expect(page.get_by_role("cell", name="Is paused: True → False.").first).to_be_visible()
