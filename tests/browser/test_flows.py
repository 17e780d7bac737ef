"""What people do in the App, on the real stack: keys, Jobs and harvests from their making to their end."""

import json
import os
import re
import subprocess
import sys

import httpx
from playwright.sync_api import Page, expect

from tests.browser.accessibility import PHONE_WIDTH, assert_accessible
from tests.browser.conftest import DESKTOP
from tests.browser.people import Person, sign_in
from tests.harvest import harvests
from tests.jobs.jobs import LONG, submit
from tests.stack import Stack, StackUser

BODY = {"model": "tiny", "prompt": "The sky is", "max_tokens": 6, "temperature": 0}


def as_user(person: Person) -> StackUser:
    return StackUser(id=person.id, key_id=person.key_id, username=person.username, key=person.key)


def ask(stack: Stack, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.base_url}/v1/completions", json=BODY, headers=headers, timeout=120)


def test_a_key_is_made_copied_used_paused_and_revoked(page: Page, person: Person, inference_stack: Stack) -> None:
    sign_in(page, person, to="/app/keys")
    page.get_by_role("link", name="New key").click()
    page.wait_for_url("**/app/keys/new")
    assert_accessible(page)
    page.get_by_label("Name").fill("from the browser")
    page.get_by_label("Tokens a month").fill("100000")
    page.get_by_role("button", name="Make the key").click()
    key = page.get_by_role("region", name="Your new API key").inner_text()
    page.get_by_role("button", name="Copy: Your new API key").click()
    expect(page.get_by_text("Copied").first).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == key
    assert_accessible(page)
    # On a phone, too, all of the key is seen.
    page.set_viewport_size({"width": PHONE_WIDTH, "height": 844})
    secret = page.get_by_role("region", name="Your new API key")
    assert secret.evaluate("element => element.scrollWidth <= element.clientWidth")
    page.set_viewport_size(DESKTOP)
    answer = ask(inference_stack, key)
    assert answer.status_code == 200
    used = answer.json()["usage"]["total_tokens"]

    page.get_by_role("link", name="I have copied it").click()
    row = page.get_by_role("row", name=re.compile("from the browser"))
    expect(row).to_contain_text(f"{used} of 100,000")
    assert_accessible(page)
    page.get_by_role("button", name="Pause from the browser").click()
    expect(row).to_contain_text("paused")
    assert ask(inference_stack, key).status_code == 401
    page.get_by_role("button", name="Resume from the browser").click()
    expect(row).to_contain_text("working")
    assert ask(inference_stack, key).status_code == 200
    page.get_by_role("link", name="Revoke from the browser").click()
    page.wait_for_url("**/revoke")
    assert_accessible(page)
    page.get_by_role("button", name="Revoke for ever").click()
    expect(page.get_by_text("Revoked keys (1)")).to_be_visible()
    assert ask(inference_stack, key).status_code == 401

    page.goto("/app/usage")
    expect(page.get_by_role("row", name=re.compile("from the browser"))).to_contain_text("100.0 %")
    assert_accessible(page)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download CSV").click()
    assert re.fullmatch(r"usage-\d{4}-\d\d\.csv", download.value.suggested_filename)
    assert "from the browser" in download.value.path().read_text()


def test_a_job_is_watched_to_its_end(page: Page, person: Person, inference_stack: Stack) -> None:
    sign_in(page, person, to="/app/jobs")
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    wanted = {**LONG, "prompt": ["The capital"] * 4, "logprobs": 3, "max_tokens": 150}
    with inference_stack.client(as_user(person)) as client:
        submit(client, wanted)
    page.reload()
    page.get_by_role("link", name="Completion").click()
    # Nobody reloads: the page does, when the Job has ended.
    expect(page.locator(".badge")).to_have_text("succeeded", timeout=60_000)
    expect(page.get_by_role("heading", name="Choice 0")).to_be_visible()
    page.wait_for_load_state("load")
    expect(page.locator("[hx-trigger]")).to_have_count(0)
    assert page.locator(".heat span").count() >= 4 * 150
    assert_accessible(page)

    # Its recipe is another Job, the same request.
    page.get_by_text("Run this from a shell script").click()
    recipe = page.get_by_role("region", name="The recipe").inner_text()
    assert '"logprobs": 3' in recipe
    page.get_by_role("link", name="Jobs").first.click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert_accessible(page)


def test_activations_are_shown(page: Page, person: Person, inference_stack: Stack) -> None:
    with inference_stack.client(as_user(person)) as client:
        job = submit(client, {**BODY, "output_residual_stream": [0, 3]})
    sign_in(page, person, to=f"/app/jobs/{job['id']}")
    expect(page.get_by_role("heading", name="Activations")).to_be_visible(timeout=60_000)
    expect(page.get_by_role("img", name=re.compile("Mean norm by layer"))).to_be_visible()
    assert_accessible(page)


def test_a_list_that_renews_itself_keeps_focus_click_and_selection(
    page: Page, person: Person, inference_stack: Stack
) -> None:
    sign_in(page, person, to="/app/jobs")
    with inference_stack.client(as_user(person)) as client:
        jobs = [submit(client, LONG) for _ in range(5)]
    page.reload()

    def renewed() -> None:
        for _ in range(2):
            with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
                pass

    link = page.locator(f"#job-{jobs[0]['id']}")
    link.focus()
    renewed()
    expect(link).to_be_focused()
    page.get_by_role("cell", name="tiny").first.select_text()
    renewed()
    assert page.evaluate("getSelection().toString()") == "tiny"
    page.evaluate("getSelection().empty()")
    # The menu of the second button keeps the end of the press for itself, and another window that of the first.
    for button in (2, 0):
        page.locator("#jobs").evaluate("(list) => { list.dataset.old = 'yes'; }")
        link.dispatch_event("pointerdown", {"button": button, "buttons": 1 << button, "isPrimary": True})
        page.mouse.move(400, 400 + button)
        expect(page.locator("#jobs[data-old]")).to_have_count(0)
    for width in (390, 660, 768):
        page.set_viewport_size({"width": width, "height": 800})
        too_wide = """() => {
            document.querySelector("td[data-label=Model]").textContent = "M".repeat(100);
            return document.documentElement.scrollWidth > innerWidth;
        }"""
        assert not page.evaluate(too_wide)
    page.set_viewport_size(DESKTOP)
    link.hover()
    page.mouse.down()
    renewed()
    page.mouse.up()
    page.wait_for_url(f"**/app/jobs/{jobs[0]['id']}")
    # A job's page is loaded anew at its end, and not under a press either. The last one waits for the others.
    with inference_stack.client(as_user(person)) as client:
        jobs += [submit(client, LONG) for _ in range(5)]
        page.goto(f"/app/jobs/{jobs[-1]['id']}")
        page.get_by_role("button", name="Copy: the id").hover()
        page.mouse.down()
        for job in reversed(jobs):
            client.post(f"completion-jobs/{job['id']}/cancel")
    for _ in range(2):
        with page.expect_response(lambda answer: "hx-refresh" in answer.headers):
            pass
    page.mouse.up()
    expect(page.get_by_text("Copied").first).to_be_visible()
    expect(page.locator(".badge")).to_have_text("cancelled")


def test_a_running_job_is_cancelled(page: Page, person: Person, inference_stack: Stack) -> None:
    sign_in(page, person, to="/app/jobs")
    with inference_stack.client(as_user(person)) as client:
        # The last of them runs for as long as a browser on a busy machine takes to get to its button.
        *others, job = [submit(client, LONG) for _ in range(5)]
    page.goto(f"/app/jobs/{job['id']}")
    expect(page.locator(".badge")).to_have_text("running", timeout=60_000)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".badge")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    with inference_stack.client(as_user(person)) as client:
        assert client.get(f"completion-jobs/{job['id']}").json()["status"] == "cancelled"
        for other in others:
            client.post(f"completion-jobs/{other['id']}/cancel")
        assert client.get("budget").json()["held"] == 0
    assert_accessible(page)
    page.get_by_role("link", name="Erase").click()
    page.get_by_role("button", name="Erase").click()
    expect(page.get_by_text("were erased")).to_be_visible()


def test_the_shell_recipe_runs_as_it_stands(page: Page, person: Person, inference_stack: Stack) -> None:
    sign_in(page, person, to="/app/jobs")
    page.get_by_role("link", name="Run a Job from a shell script").first.click()
    page.wait_for_url("**/app/jobs/shell")
    assert_accessible(page)
    recipe = page.get_by_role("region", name="The recipe").inner_text()
    environment = {**os.environ, "ACS_API_KEY": person.key}
    environment.pop("ACS_API_BASE", None)
    for _ in range(2):
        ran = subprocess.run(
            ["sh", "-c", recipe],
            env=environment,
            cwd=inference_stack.home,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["choices"][0]["finish_reason"] == "length"
    page.goto("/app/jobs")
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_harvest_is_watched_and_its_files_are_read(page: Page, person: Person, harvest_stack: Stack) -> None:
    submitted = harvests.submit(harvest_stack, as_user(person), prompts=["One two", "Three"], layers="all")
    sign_in(page, person, to=f"/app/jobs/harvest/{submitted['job_id']}")
    expect(page.locator(".badge")).to_have_text("done", timeout=120_000)
    expect(page.get_by_role("img", name=re.compile("Mean norm by layer"))).to_be_visible()
    assert_accessible(page)
    link = page.get_by_role("link", name="shard_00000.safetensors").get_attribute("href")
    assert link is not None
    with page.expect_download() as download:
        page.get_by_role("link", name="shard_00000.safetensors").click()
    assert download.value.suggested_filename == "shard_00000.safetensors"
    assert download.value.path().read_bytes() == httpx.get(link, timeout=120).raise_for_status().content
    snippet = page.get_by_role("region", name="Reading the files in Python").inner_text()
    ran = subprocess.run(
        [sys.executable, "-c", snippet],
        env={**os.environ, "ACS_API_KEY": person.key},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "torch.float32" in ran.stdout
    page.get_by_role("link", name="Delete the files").click()
    page.wait_for_url("**/delete")
    assert_accessible(page)
    page.get_by_role("button", name="Delete the files").click()
    expect(page.get_by_text("They were deleted")).to_be_visible()
