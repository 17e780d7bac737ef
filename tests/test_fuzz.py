"""Thousands of malformed requests against a running API: never a 500, never HTML, never a hang, the right `param`."""

import asyncio
import base64
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from tests.stack import Stack, StackUser

SEED: Final = 20_261_129
AT_ONCE: Final = 12
# What hangs does so for ever; what is answered may wait behind eleven others on a busy machine.
SECONDS_AT_MOST: Final = 120.0
REQUEST_ID: Final = re.compile(r"req_[0-9a-f]{32}\Z")
TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}
# A valid Completion may find no inference worker here; what is refused never gets that far.
HONEST: Final = {"model_unavailable"}

ZEROS: Final = base64.b64encode(bytes(64 * 4)).decode()
TENSOR: Final[dict[str, Any]] = {
    "data": ZEROS,
    "dtype": "float32",
    "original_dtype": "torch.float32",
    "shape": [1, 64],
    "compression": "none",
}
COMPLETION: Final[dict[str, Any]] = {
    "model": "tiny",
    "prompt": "The sky is",
    "max_tokens": 4,
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "stop": ["x"],
    "logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
    "stream": False,
    "add_special_tokens": True,
    "user": "me",
    "logit_bias": {"5": 1.0},
    "min_tokens": 1,
    "ignore_eos": False,
    "stop_token_ids": [3],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "allowed_token_ids": [4, 5, 6],
    "logprob_token_ids": [4],
    "return_token_ids": True,
    "output_residual_stream": [0, 1],
    "apply_steering_vectors": [{"activations": TENSOR, "layer_indices": [1], "scale": 0.5, "norm_match": False}],
}
HARVEST: Final[dict[str, Any]] = {
    "model": "tiny",
    "prompts": ["The sky is", "Water is"],
    "layers": [0, 1],
    "shard_size": 2,
    "batch_size": 1,
    "add_special_tokens": True,
    "project_onto": TENSOR | {"data": base64.b64encode(b"\0\0\x80?" * 64).decode()},
}
ROUTES: Final = {"completions": COMPLETION, "harvest": HARVEST, "completion-jobs": COMPLETION}
CANCEL_JOBS: Final = """
from harvest.models import HarvestJob
from harvest.services import cancel_harvest
from jobs.models import CompletionJob
from jobs.services import cancel_job
waiting = CompletionJob.objects.filter(user_id=user, finished_at=None)
result = [cancel_job(job_id=pk).status for pk in waiting.values_list("pk", flat=True)]
waiting = HarvestJob.objects.filter(user_id=user, status__in=["pending", "running"])
result += [cancel_harvest(job_id=pk).status for pk in waiting.values_list("pk", flat=True)]
"""
ODD_VALUES: Final[tuple[Any, ...]] = (
    (True, False, 0, -1, 1, 1.0, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, "", "5", "x" * 300, "\x00")
    + ("\ud800", "\ufeff", [], [[]], [None], [True], [1.0], ["a", 1], [[1], "a"], [-1], [10**30], {}, {"": 1})
    + ({"a": {"b": []}}, {"data": 1}, {"5": "1"}, {"-1": 1}, {"05": 1}, {"1e2": 1}, [{}], [{"activations": None}])
    + ([[[[[[1]]]]]], [0] * 2000, ["\ud800"], "all", "ALL", "none", "null", [{"activations": {"data": "="}}])
)
ODD_HEADERS: Final = (
    ("accept", "text/html"),
    ("accept", "x/y"),
    ("content-encoding", "gzip"),
    ("content-type", "application/json; charset=latin-1"),
    ("expect", "100-continue"),
    ("host", "evil.example"),
    ("host", "a b"),
    ("range", "bytes=0-1"),
    ("x-http-method-override", "DELETE"),
    ("x-request-id", "é"),
)

ODD_KEYS: Final = ("", "a", "a", "x" * 255, "x" * 256, "a b", "é", "\xc3\xa9", "\x80", "null", "{}", "x" * 5_000)


@dataclass(frozen=True)
class Case:
    """One request; `param`, where it is set, is the field that the answer must name (it, or a part of it)."""

    method: str
    path: str
    content: bytes | None
    headers: dict[str, str]
    param: str | None = None

    def describe(self) -> str:
        """Say what was sent, shortly."""
        return f"{self.method} {self.path} {self.headers} {(self.content or b'')[:300]!r}"


def _dump(value: Any) -> bytes:
    # Lone surrogates go as escapes, the way a client would send them.
    return json.dumps(value).encode()


def _json_case(route: str, body: Any, param: str | None = None) -> Case:
    return Case("POST", route, _dump(body), _json_headers(route), param)


def _json_headers(route: str) -> dict[str, str]:
    """The headers of a body, with a new Idempotency-Key where the route needs one."""
    headers = {"content-type": "application/json"}
    return headers | ({"idempotency-key": uuid.uuid4().hex} if route == "completion-jobs" else {})


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


def _replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(body))
    parent = copy
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return copy


def _odd_field_cases(random_: random.Random, *, one_in: int) -> Iterator[Case]:
    """Every field, and every part of one, replaced by odd values: it may be valid, it may not end badly.

    Each is replaced by one in so many of the values, which take turns.
    """
    for route, body in ROUTES.items():
        for number, path in enumerate(_paths(body)):
            for value in ODD_VALUES[number % one_in :: one_in]:
                yield _json_case(route, _replaced(body, path, value))
    for _ in range(600 // one_in):
        route, body = random_.choice(list(ROUTES.items()))
        for _ in range(random_.randint(2, 4)):
            path = random_.choice(list(_paths(body)))
            body = _replaced(body, path, random_.choice(ODD_VALUES))
        yield _json_case(route, body)


def _named_field_cases() -> Iterator[Case]:
    """A minimal body with one field that cannot be valid: the answer names that field."""
    minimal: dict[str, dict[str, Any]] = {
        "completions": {"model": "tiny", "prompt": "a", "max_tokens": 2},
        "harvest": {"model": "tiny"},
    }
    minimal["harvest"]["prompts"] = ["a"]
    minimal["completion-jobs"] = minimal["completions"]
    never_valid: tuple[Any, ...] = ({"a": 1}, [{"b": 1}], 10**400, "\x00", [["\ud800"]], -(10**20), [[[]]])
    for route, body in ROUTES.items():
        for name in body:
            for value in never_valid:
                yield _json_case(route, minimal[route] | {name: value}, param=name)
        for name in ("Prompt", "max_token", "", "layers ", "__class__", "prompt.0"):
            yield _json_case(route, minimal[route] | {name: 1}, param=name)
        for missing in minimal[route]:
            if missing != "max_tokens":
                yield _json_case(route, {k: v for k, v in minimal[route].items() if k != missing}, param=missing)


def _broken_json_cases(random_: random.Random) -> Iterator[Case]:
    """Bodies that are not JSON, or JSON that no client means, and bytes changed at random."""
    odd = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b'"a"',
        b"\xff\xfe",
        b"{}" * 2,
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1,"a":1}',
    ]
    odd += [b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b"9" * 100_000]
    odd += [
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"model":"\\ud800"}',
        b'{"model":"\\udc00\\ud800"}',
        b"\x00" * 1000,
    ]
    odd += [
        b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5_000 + b"}",
        b'{"model":"tiny","prompt":"a","top_p":1e999}',
    ]
    odd += [
        b'{"model":"tiny","prompt":"a","temperature":-0.0,"max_tokens":1e0}',
        b"{'model':1}",
        b"<html></html>",
        b"a=1&b=2",
    ]
    for route, body in ROUTES.items():
        for content in odd:
            yield Case("POST", route, content, _json_headers(route))
        for _ in range(500):
            mutated = bytearray(_dump(body))
            for _ in range(random_.randint(1, 6)):
                place = random_.randrange(len(mutated))
                act = random_.randrange(3)
                if act == 0:
                    mutated[place] = random_.randrange(256)
                elif act == 1:
                    del mutated[place : place + random_.randint(1, 40)]
                else:
                    mutated[place:place] = random_.randbytes(random_.randint(1, 8))
                if not mutated:
                    mutated = bytearray(b"{")
            yield Case("POST", route, bytes(mutated), _json_headers(route))


def _odd_request_cases() -> Iterator[Case]:
    """Odd methods, paths, queries and headers."""
    body = _dump({"model": "tiny", "prompt": "a", "max_tokens": 1})
    ids: tuple[str, ...] = (
        "0",
        "x",
        "..",
        "%00",
        "019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f1",
        "019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10",
    )
    ids += (
        "019a2f4c1f0e7c3a9d553a1f0f3f6f10",
        "%ff",
        "a" * 3_000,
        "019A2F4C-1F0E-7C3A-9D55-3A1F0F3F6F10",
        "%F0%9F%98%80",
    )
    for method in ("GET", "PUT", "PATCH", "DELETE", "POST", "HEAD", "OPTIONS", "TRACE", "PROPFIND"):
        for path in (
            "completions",
            "harvest",
            "completion-jobs",
            "models",
            "nothing",
            "chat/completions",
            "models/tiny",
            "completions/",
        ):
            yield Case(method, path, None, {})
        for one in ids:
            jobs = (f"completion-jobs/{one}", f"completion-jobs/{one}/result", f"completion-jobs/{one}/cancel")
            for path in (f"models/{one}", f"harvest/{one}", f"harvest/{one}/cancel", *jobs):
                yield Case(method, path, None, {})
    for query in (
        "wait=-1",
        "wait=61",
        "wait=a",
        "wait=",
        "wait=1.0",
        "wait=%00",
        "wait=" + "9" * 5_000,
        "wait=1&wait=x",
    ):
        yield Case("GET", f"harvest/{ids[5]}?{query}", None, {})
    for query in (
        "limit=0",
        "limit=101",
        "limit=x",
        "after=x",
        "after=%00",
        "status=x",
        "status=%00",
        "model=%00",
        "limit=",
    ):
        yield Case("GET", f"harvest?{query}", None, {})
        yield Case("GET", f"completion-jobs?{query}", None, {})
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "a/b;" * 50,
        "*/*",
    ):
        yield Case("POST", "completions", body, {"content-type": kind})
    for name, value in ODD_HEADERS:
        yield Case("POST", "completions", body, {"content-type": "application/json"} | {name: value})
    for route, content in (("completions", body), ("harvest", _dump({"model": "tiny", "prompts": ["a"]}))):
        for key in ODD_KEYS:
            yield Case("POST", route, content, {"content-type": "application/json", "idempotency-key": key})


def _check(case: Case, answer: httpx.Response) -> str:
    """Assert what holds for every answer, and say how it ended."""
    what = f"{case.describe()} -> {answer.status_code} {answer.text[:400]}"
    assert REQUEST_ID.match(answer.headers.get("x-request-id", "")), what
    if case.method == "HEAD" or answer.status_code in (202, 200, 204):
        assert answer.status_code < 500, what
        assert case.param is None, what
        return str(answer.status_code)
    assert answer.headers["content-type"] == "application/json", what
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}, what
    status = answer.status_code
    assert error["type"] == TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"), what
    assert status < 500 or error["code"] in HONEST, what
    assert isinstance(error["message"], str), what
    assert len(error["message"]) < 2_000, what
    assert "Traceback" not in error["message"], what
    if case.param is not None:
        assert status == 400, what
        assert error["code"] == "invalid_request", what
        assert error["param"] == case.param or str(error["param"]).startswith(f"{case.param}."), what
    return str(error["code"])


@pytest_asyncio.fixture
async def fuzzed(harvest_stack: Stack) -> AsyncIterator[Callable[[list[Case]], Any]]:
    """Return what sends cases, some at once, and counts how they ended."""
    user: StackUser = harvest_stack.new_user(harvests_unfinished=1_000_000, jobs_unfinished=1_000_000)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with harvest_stack.async_client(user, limits=limits, timeout=SECONDS_AT_MOST) as client:
        turns = asyncio.Semaphore(AT_ONCE)

        async def send(case: Case) -> str:
            async with turns:
                headers = {name.encode(): value.encode("latin-1", "replace") for name, value in case.headers.items()}
                request = client.build_request(case.method, case.path, content=case.content, headers=headers)
                return _check(case, await client.send(request))

        async def send_all(cases: list[Case]) -> Counter[str]:
            return Counter(await asyncio.gather(*(send(case) for case in cases)))

        yield send_all
    # No engine serves here, or a busy one, and later tests' Jobs must not wait for these.
    harvest_stack.django(CANCEL_JOBS, user=user.id)


@pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.asyncio
async def test_odd_values_in_every_field_end_in_an_error_object_or_an_answer(fuzzed: Any, one_in: int) -> None:
    ended = await fuzzed(list(_odd_field_cases(random.Random(SEED), one_in=one_in)))
    assert ended["invalid_request"] > 2_400 / one_in
    assert sum(ended.values()) > 6_000 / one_in


@pytest.mark.asyncio
async def test_a_field_that_cannot_be_valid_is_named(fuzzed: Any) -> None:
    ended = await fuzzed(list(_named_field_cases()))
    assert set(ended) == {"invalid_request"}


@pytest.mark.asyncio
async def test_bodies_that_are_not_json_are_refused(fuzzed: Any) -> None:
    ended = await fuzzed(list(_broken_json_cases(random.Random(SEED))))
    assert ended["bad_json"] > 200


@pytest.mark.asyncio
async def test_odd_methods_paths_queries_and_headers_are_answered(fuzzed: Any) -> None:
    ended = await fuzzed(list(_odd_request_cases()))
    assert ended["not_found"] > 20
    assert ended["method_not_allowed"] > 10
