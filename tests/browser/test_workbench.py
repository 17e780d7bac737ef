"""The Workbench as a person has it: stream, stop, alternatives, steering, and the same request as code."""

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from playwright.sync_api import Page, expect

from tests.browser.accessibility import assert_accessible
from tests.browser.people import Person, sign_in
from tests.stack import Stack

MONEY = """
from budgets.models import Budget, Hold, LedgerEntry
entries = LedgerEntry.objects.filter(budget__user_id=user)
result = {
    "live": Hold.objects.filter(budget__user_id=user, state="live").count(),
    "held": sum(Hold.objects.filter(budget__user_id=user).values_list("tokens", flat=True)),
    "charged": sum(entry.tokens for entry in entries),
    "kinds": sorted({entry.work_kind for entry in entries}),
    "used": sum(Budget.objects.filter(user_id=user).values_list("used", flat=True)),
}
"""
# In the page itself: a test that saw the first token might come too late with its click.
STOP_AT_THE_FIRST_TOKEN = """
() => new MutationObserver((_, observer) => {
  if (!document.querySelector("#base .token")) return;
  observer.disconnect();
  document.querySelector("#stop-run").click();
}).observe(document.querySelector("#base"), { childList: true, subtree: true })
"""
TOWARD, AWAY = "I love this. It is wonderful", "I hate this. It is terrible"


@pytest.fixture
def workbench(page: Page, person: Person, inference_stack: Stack, browser_thread: Any) -> Page:
    """Return a window that shows the Workbench to a signed-in person."""

    def go() -> None:
        sign_in(page, person, to="/app/workbench")
        expect(page.locator("#workbench[data-ready]")).to_be_visible()

    browser_thread.submit(go).result()
    return page


def money(stack: Stack, person: Person) -> dict[str, Any]:
    found: dict[str, Any] = stack.django(MONEY, user=person.id)
    return found


def settled(stack: Stack, person: Person) -> dict[str, Any]:
    """Return the money once no Hold is live."""
    deadline = time.monotonic() + 60
    while (found := money(stack, person))["live"]:
        assert time.monotonic() < deadline, found
    return found


def set_up(page: Page, prompt: str, **settings: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)


def test_a_prompt_streams_and_each_token_shows_what_else_was_likely(
    workbench: Page, person: Person, inference_stack: Stack
) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "The sky is", "max_tokens": 12, "temperature": 0, "logprobs": 5}
    with inference_stack.client() as client:
        choice = client.post("completions", json=body).json()["choices"][0]
    set_up(workbench, "The sky is", max_tokens="12", temperature="0")
    workbench.get_by_role("button", name="Run", exact=True).click()
    expect(workbench.locator("#state")).to_contain_text("Done, with seed")
    tokens = workbench.locator("#base .token")
    assert tokens.all_text_contents() == choice["logprobs"]["tokens"]
    assert f"{choice['logprobs']['token_logprobs'][3]:.3f}" in (tokens.nth(3).get_attribute("title") or "")
    tokens.nth(3).click()
    alternatives = workbench.get_by_role("region", name="Completion: alternatives")
    expect(alternatives.get_by_role("listitem")).to_have_count(len(choice["logprobs"]["top_logprobs"][3]))
    assert_accessible(workbench)
    # By keyboard: the next token, its alternatives, and away again.
    tokens.nth(3).focus()
    workbench.keyboard.press("ArrowRight")
    workbench.keyboard.press("Enter")
    expect(alternatives).to_contain_text("Token 5")
    workbench.keyboard.press("Escape")
    expect(alternatives).to_be_hidden()
    found = settled(inference_stack, person)
    assert found["kinds"] == ["app"]
    assert found["used"] == found["charged"] == len(choice["logprobs"]["tokens"]) + 4


def test_a_sampled_run_is_run_again_with_its_seed(workbench: Page) -> None:
    set_up(workbench, "The capital", max_tokens="16", n="2")
    workbench.get_by_role("button", name="Run", exact=True).click()
    again = workbench.get_by_role("button", name="Run again with seed")
    expect(again).to_be_visible()
    first = workbench.locator("#base .tokens").all_text_contents()
    assert len(first) == 2
    again.click()
    expect(workbench.locator("#state")).to_contain_text("Done")
    expect(workbench.locator("#base .tokens")).to_have_text(first, use_inner_text=False)


def test_stop_ends_the_request_in_the_engine_and_charges_what_was_generated(
    workbench: Page, person: Person, inference_stack: Stack
) -> None:
    set_up(workbench, "The capital", max_tokens="500", n="16", logprobs="0")
    expect(workbench.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    workbench.evaluate(STOP_AT_THE_FIRST_TOKEN)
    workbench.get_by_role("button", name="Run", exact=True).click()
    expect(workbench.locator("#state")).to_contain_text("Stopped")
    expect(workbench.locator("#base .token").first).to_be_visible()
    expect(workbench.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    found = settled(inference_stack, person)
    assert 0 < found["charged"] < found["held"]


def test_what_the_api_refuses_is_said_beside_its_field(workbench: Page) -> None:
    set_up(workbench, "The sky is", max_tokens="30000")
    workbench.get_by_role("button", name="Run", exact=True).click()
    fault = workbench.get_by_role("alert").filter(has_text="context_length_exceeded")
    expect(fault).to_be_visible()
    assert workbench.locator("#max_tokens").get_attribute("aria-invalid") == "true"


def residual_stream(client: httpx.Client, prompt: str, layer: int) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "output_residual_stream": [layer]}
    tensor = client.post("completions", json=body).json()["activations"]["residual_stream"]
    data = zstandard.decompress(base64.b64decode(tensor["data"]))
    return np.frombuffer(data, "<f4").reshape(tensor["shape"])[0]


def test_a_study_of_steering_needs_no_code_and_its_code_gives_the_same(
    workbench: Page, person: Person, inference_stack: Stack
) -> None:
    set_up(workbench, "The sky is", max_tokens="12", temperature="0", seed="7")
    workbench.get_by_role("button", name="Read both prompts").click()
    expect(workbench.locator("#differences .bars button")).to_have_count(4)
    workbench.get_by_role("button", name="layer 1: the difference").click()
    expect(workbench.locator("#state")).to_contain_text("Done")
    scale = workbench.get_by_label("Scale")
    scale.focus()
    for _ in range(8):
        workbench.keyboard.press("ArrowRight")
    expect(workbench.locator("#scale-now")).to_have_text("6.0")
    expect(workbench.locator("#python code")).to_contain_text('SCALE = "tiny", 1, 6')
    expect(workbench.locator("#state")).to_contain_text("Done")
    expect(workbench.locator("#steered .figures")).to_contain_text("tokens")
    base, steered = (workbench.locator(f"#{name} .tokens").text_content() for name in ("base", "steered"))
    assert base != steered
    assert_accessible(workbench)

    with inference_stack.client() as client:
        vector = residual_stream(client, TOWARD, 1)[-1] - residual_stream(client, AWAY, 1)[-1]
        tensor = {
            "data": base64.b64encode(vector.tobytes()).decode(),
            "dtype": "float32",
            "original_dtype": "torch.float32",
            "shape": [1, len(vector)],
            "compression": "none",
        }
        body = {"model": "tiny", "prompt": "The sky is", "max_tokens": 12, "temperature": 0, "logprobs": 0}
        steering = [{"activations": tensor, "layer_indices": [1], "scale": 6.0}]
        by_hand = [
            client.post("completions", json={**body, **extra}).json()["choices"][0]
            for extra in ({}, {"apply_steering_vectors": steering})
        ]
    assert [base, steered] == ["".join(choice["logprobs"]["tokens"]) for choice in by_hand]
    base_text, steered_text = (choice["text"] for choice in by_hand)

    workbench.get_by_role("tab", name="Python").click()
    code = workbench.locator("#python code").text_content() or ""
    environment = {**os.environ, "ACS_API_BASE": f"{inference_stack.base_url}/v1", "ACS_API_KEY": person.key}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.stdout.splitlines() == [f"base {base_text!r}", f"steered {steered_text!r}"], ran.stderr
    workbench.get_by_role("tab", name="curl").click()
    curl = workbench.locator("#curl code").text_content() or ""
    answered = subprocess.run(
        curl, shell=True, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    assert json.loads(answered.stdout)["choices"][0]["text"] == steered_text


def test_the_doors_want_a_session_and_its_csrf_token(api: Stack, person: Person) -> None:
    body = {"model": "tiny", "prompt": "x"}
    door = "/app/workbench/completions"
    with httpx.Client(base_url=api.base_url, timeout=120) as client:
        assert client.get("/app/workbench").headers["location"] == "/app/sign-in?next=/app/workbench"
        # Without the token, a session changes nothing: another site's form would have one too.
        assert client.post(door, json=body).status_code == 403
        form = client.get("/app/sign-in")
        headers = {"X-CSRFToken": form.cookies["csrftoken"]}
        assert client.post(door, json=body, headers=headers).json()["error"]["code"] == "invalid_api_key"
        key = {**headers, "Authorization": f"Bearer {person.key}"}
        assert client.post(door, json=body, headers=key).status_code == 401
        fields = {"username": person.username, "password": person.password}
        client.post("/app/sign-in", data=fields, headers=headers)
        headers = {"X-CSRFToken": client.cookies["csrftoken"]}
        assert client.post(door, json=body).status_code == 403
        assert (
            client.post(door, content=b"[", headers=headers | {"Content-Type": "application/json"}).status_code == 400
        )
        twice = client.post(door, json=body, headers=headers | {"Idempotency-Key": "once"})
        assert twice.status_code in (200, 503)
        assert client.get("/app/workbench/models").json()["data"][0]["id"] == "tiny"
