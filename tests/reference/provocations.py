"""How a test makes the API answer with each error code, on the stack that all tests share; or which other test does."""

import time
from typing import Any, Final

import httpx

from acsinfra.core.errors import ErrorCode
from tests.inference.money import set_limits
from tests.jobs.jobs import submit, wait_for
from tests.stack import Stack, StackUser

# Codes that need a part to be away or broken, or more seconds than an example is worth, and the test that sees each.
ELSEWHERE: Final[dict[ErrorCode, str]] = {
    ErrorCode.IDEMPOTENCY_IN_PROGRESS: "tests/inference/test_idempotent_completions.py"
    "::test_a_retry_that_waits_too_long_is_told_to_come_again",
    ErrorCode.INTERNAL_ERROR: "tests/acsinfra/core/test_api_view.py::test_a_view_that_fails_answers_an_error_object",
    ErrorCode.ENGINE_ERROR: "tests/inference/test_completions_faults.py"
    "::test_an_engine_that_dies_fails_what_it_had_and_comes_back",
    ErrorCode.HARVEST_UNAVAILABLE: "tests/harvest/test_routes.py::test_without_a_runner_the_job_is_kept_as_failed",
    ErrorCode.SERVICE_UNAVAILABLE: "tests/inference/test_completions_faults.py"
    "::test_a_broker_that_stays_away_is_a_503_and_its_return_is_enough",
    ErrorCode.ENGINE_TIMEOUT: "tests/inference/test_completions_way.py"
    "::test_past_the_time_limit_the_answer_is_a_timeout_and_the_engine_stops",
}
# A model that no engine serves, whose residual stream is too wide for any capture of more than a token.
SPARE: Final = "tiny-spare"
_ADD_SPARE: Final = """
from inference.models import BaseModel
from inference.services import add_model
if not BaseModel.objects.filter(name=name).exists():
    add_model(name=name, source=source, dtype="float32", has_harvest=False)
    BaseModel.objects.filter(name=name).update(hidden_size=2**23)
"""
_SET_LOADING: Final = """
from django.utils import timezone
from inference.models import BaseModel, Engine
Engine.objects.filter(base_model__name=name).delete()
if is_loading:
    of = BaseModel.objects.get(name=name)
    Engine.objects.create(base_model=of, kind="inference", host="here", pid=1, heartbeat_at=timezone.now())
"""
_SET_PAUSE: Final = """
from budgets.models import SpendLimit
SpendLimit.objects.update_or_create(pk=1, defaults={"is_paused": paused})
"""
_EXPIRE: Final = """
from django.utils import timezone
from jobs.models import CompletionJob
CompletionJob.objects.filter(pk=job).update(expires_at=timezone.now())
"""
# As if the storage had lost it.
_LOSE: Final = """
from jobs.models import JobResult
JobResult.objects.filter(job_id=job).update(body=None, key=f"jobs/{job}/lost")
"""
_LIMITS: Final[dict[ErrorCode, dict[str, int]]] = {
    ErrorCode.RATE_LIMITED: {"requests_per_minute": 1},
    ErrorCode.QUEUE_FULL: {"requests_at_once": 0, "requests_queued": 0},
    ErrorCode.JOB_CAPACITY: {"jobs_unfinished": 0},
    ErrorCode.HARVEST_CONCURRENCY_EXCEEDED: {"harvests_unfinished": 0},
    ErrorCode.HARVEST_QUOTA_EXCEEDED: {"harvests_per_month": 0},
}
_SMALL: Final[dict[str, Any]] = {"model": "tiny", "prompt": "One", "max_tokens": 1}
_SPARE: Final[dict[str, Any]] = _SMALL | {"model": SPARE}
_HARVEST: Final[dict[str, Any]] = {"model": "tiny", "prompts": ["One"]}
_OF_SPARE: Final = {
    ErrorCode.HARVEST_UNSUPPORTED,
    ErrorCode.ACTIVATION_PROMPT_TOO_LONG,
    ErrorCode.MODEL_UNAVAILABLE,
    ErrorCode.MODEL_STARTING,
}


def provoke(stack: Stack, code: ErrorCode) -> httpx.Response:
    """Make the API answer with `code`, for a new User."""
    user: StackUser = stack.new_user(**_LIMITS.get(code, {}))
    with stack.client(user) as client:
        if code in _OF_SPARE:
            return _of_spare(stack, client, code)
        match code:
            case ErrorCode.BUDGET_EXCEEDED:
                set_limits(stack, user, tokens=1)
                return client.post("completions", json=_SMALL)
            case ErrorCode.SPEND_CAP:
                return _while_paused(stack, client)
            case ErrorCode.JOB_CANCELLED | ErrorCode.JOB_RESULT_EXPIRED | ErrorCode.JOB_FAILED:
                return _of_job(stack, client, code)
            case ErrorCode.JOB_CAPACITY:
                return client.post("completion-jobs", json=_SMALL, headers={"Idempotency-Key": "one"})
            case ErrorCode.HARVEST_CONCURRENCY_EXCEEDED | ErrorCode.HARVEST_QUOTA_EXCEEDED:
                return client.post("harvest", json=_HARVEST)
        return _of_request(client, code)


def _of_request(client: httpx.Client, code: ErrorCode) -> httpx.Response:
    """Send a request that is refused for what it says."""
    match code:
        case ErrorCode.INVALID_REQUEST:
            return client.post("completions", json=_SMALL | {"max_tokens": 40_000})
        case ErrorCode.BAD_JSON:
            return client.post("completions", content=b'{"prompt": }', headers={"Content-Type": "application/json"})
        case ErrorCode.MODEL_NOT_FOUND:
            return client.post("completions", json=_SMALL | {"model": "nothing"})
        case ErrorCode.CORPUS_TOO_LARGE:
            return client.post("harvest", json=_HARVEST | {"prompts": ["x" * 8_000_001]})
        case ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            return client.post("completions", json=_SMALL | {"max_tokens": 9_000})
        case ErrorCode.FULL_VOCAB_PROMPT_TOO_LONG:
            long = {"prompt": "one " * 100, "n": 16, "prompt_logprobs": -1}
            return client.post("completions", json=_SMALL | long)
        case ErrorCode.CHAT_COMPLETIONS_UNSUPPORTED:
            return client.post("chat/completions", json={"messages": []})
        case ErrorCode.INVALID_API_KEY:
            return httpx.get(client.base_url.join("models"), timeout=120)
        case ErrorCode.NOT_FOUND:
            return client.get("nothing")
        case ErrorCode.METHOD_NOT_ALLOWED:
            return client.delete("budget")
        case ErrorCode.REQUEST_TOO_LARGE:
            return client.post("completions", json=_SMALL | {"user": "x" * 10 * 2**20})
        case ErrorCode.UNSUPPORTED_MEDIA_TYPE:
            return client.post("completions", content=b"{}", headers={"Content-Type": "text/plain"})
        case ErrorCode.IDEMPOTENCY_CONFLICT:
            submit(client, _SMALL, key="one")
            return client.post("completion-jobs", json=_SMALL | {"prompt": "Two"}, headers={"Idempotency-Key": "one"})
        case ErrorCode.RATE_LIMITED:
            # At the second; a request whose count a busy broker brings late is let pass.
            give_up_at = time.monotonic() + 60
            while (answer := client.get("models")).status_code == 200:
                assert time.monotonic() < give_up_at, "no request is refused"
            return answer
        case ErrorCode.QUEUE_FULL:
            return client.post("completions", json=_SMALL)
    raise AssertionError(code)


def _of_job(stack: Stack, client: httpx.Client, code: ErrorCode) -> httpx.Response:
    """Ask for the result of a Job that has none."""
    # More than an engine does before the cancel comes, however late that is on a busy machine.
    much = {"prompt": ["One"] * 60, "max_tokens": 480, "ignore_eos": True}
    long = much if code is ErrorCode.JOB_CANCELLED else {}
    job = submit(client, _SMALL | long)["id"]
    if code is ErrorCode.JOB_CANCELLED:
        client.post(f"completion-jobs/{job}/cancel")
    else:
        wait_for(client, job)
        stack.django(_EXPIRE if code is ErrorCode.JOB_RESULT_EXPIRED else _LOSE, job=job)
    return client.get(f"completion-jobs/{job}/result")


def _of_spare(stack: Stack, client: httpx.Client, code: ErrorCode) -> httpx.Response:
    """Ask for what the spare model cannot do; the API hears of it, and of its engines, within a second."""
    stack.django(_ADD_SPARE, name=SPARE, source=str(stack.tiny_model))
    if code is ErrorCode.HARVEST_UNSUPPORTED:
        return _until(code, client, "harvest", _HARVEST | {"model": SPARE})
    if code is ErrorCode.ACTIVATION_PROMPT_TOO_LONG:
        capture = {"prompt": "One two three", "output_residual_stream": True}
        return _until(code, client, "completions", _SPARE | capture)
    stack.django(_SET_LOADING, name=SPARE, is_loading=code is ErrorCode.MODEL_STARTING)
    answer = _until(code, client, "completions", _SPARE)
    stack.django(_SET_LOADING, name=SPARE, is_loading=False)
    return answer


def _until(code: ErrorCode, client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    give_up_at = time.monotonic() + 60
    while (answer := client.post(path, json=body)).json()["error"]["code"] != code.value:
        assert time.monotonic() < give_up_at, answer.text
        time.sleep(0.1)
    return answer


def _while_paused(stack: Stack, client: httpx.Client) -> httpx.Response:
    """Return the answer while an operator has paused new GPU work; the API hears of both within a second."""
    stack.django(_SET_PAUSE, paused=True)
    try:
        while (answer := client.post("completions", json=_SMALL)).status_code == 200:
            pass
    finally:
        stack.django(_SET_PAUSE, paused=False)
    while client.post("completions", json=_SMALL).status_code == 429:
        time.sleep(0.1)
    return answer
