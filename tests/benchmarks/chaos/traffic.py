"""What a chaos run's researchers do, and what they see: Completions, Jobs and Harvest jobs, whatever dies."""

import asyncio
import json
import random
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.stack import Stack, StackUser

# What a request may be answered while a part is down (api.md sections 1, 4, 5, 8).
HONEST = {
    409: {"idempotency_in_progress"},
    502: {"engine_error"},
    503: {"model_unavailable", "model_starting", "service_unavailable", "harvest_unavailable"},
    504: {"engine_timeout"},
}
# How a Job may end that never came to its Completion.
HONEST_JOB_ENDS = {"engine_error", "engine_timeout", "job_failed", "service_unavailable"}
# A token that is ahead of the next by less than this may be another one in another batch.
NEAR_TIE = 0.02


@dataclass(frozen=True)
class Question:
    """A greedy request, and what an undisturbed engine answers: its text and the tokens to be charged."""

    body: dict[str, Any]
    text: str
    tokens: int


@dataclass
class AskedJob:
    """A Job that was accepted, and what was done to it."""

    id: str
    question: Question
    is_cancelled: bool = False


@dataclass(frozen=True)
class Refused:
    """A first answer, 502 or 504, after which its key was answered otherwise: no work may have begun under it."""

    key: str
    status: int
    request_id: str
    then: int


@dataclass
class Seen:
    """What the traffic saw. `faults` are broken promises, each a sentence."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    jobs: list[AskedJob] = field(default_factory=list)
    harvests: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    # Tokens of the answers that arrived whole, by User.
    whole: Counter[int] = field(default_factory=Counter)


def find_questions(stack: Stack, *, count: int, seed: int) -> list[Question]:
    """Ask an undisturbed engine until `count` greedy answers are clear of near ties."""
    chance = random.Random(seed)
    words = ["the", "sky", "sea", "old", "river", "stone", "light", "house", "of", "and", "under", "green", "never"]
    questions: list[Question] = []
    with stack.client() as client:
        while len(questions) < count:
            prompt = " ".join(chance.choices(words, k=chance.randint(3, 20)))
            max_tokens = chance.choice((1, 8, 40, 120, 300))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            answer = client.post("completions", json=body | {"logprobs": 2}).raise_for_status().json()
            choice = answer["choices"][0]
            margins = [
                abs(values[0] - values[1])
                for values in (sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"])
                if len(values) > 1
            ]
            if min(margins, default=0.0) > NEAR_TIE:
                questions.append(Question(body, choice["text"], answer["usage"]["total_tokens"]))
    return questions


class Researcher:
    """One User with a key, who asks through either API process and tries again as a client would."""

    def __init__(
        self, user: StackUser, *, urls: list[str], questions: list[Question], seen: Seen, chance: random.Random
    ) -> None:
        self.user = user
        self._questions = questions
        self._seen = seen
        self._chance = chance
        headers = {"Authorization": f"Bearer {user.key}"}
        self._clients = [httpx.AsyncClient(base_url=url, headers=headers, timeout=120) for url in urls]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def complete(self, until: asyncio.Event) -> None:
        """Ask for Completions, a third of them streams; now and then leave in the middle."""
        while not until.is_set():
            question = self._chance.choice(self._questions)
            if self._chance.random() < 0.1:
                await self._leave(question)
            elif self._chance.random() < 0.35:
                await self._stream(question)
            else:
                response = await self._ask("completion", "POST", "completions", json=question.body)
                if response is not None and response.status_code == 200:
                    self._check("a Completion", response.json(), question)

    async def complete_once_each(self, until: asyncio.Event) -> None:
        """Ask for Completions under Idempotency-Keys, each again until it is answered, and then once more."""
        while not until.is_set():
            question, key = self._chance.choice(self._questions), secrets.token_hex(8)
            first = await self._insist("keyed completion", "completions", question.body, key)
            again = await self._insist("keyed completion", "completions", question.body, key)
            if first is None or again is None:
                continue
            while again is not None and _differ(first, again) and first.status_code in (502, 504):
                # A refusal before any work does not use the key up. The money shows whether it was one.
                request_id = first.headers["X-Request-Id"]
                self._seen.refused.append(Refused(key, first.status_code, request_id, again.status_code))
                first, again = again, await self._insist("keyed completion", "completions", question.body, key)
            if again is not None and _differ(first, again):
                self._fault(f"key {key} was answered {first.status_code} and then otherwise, {again.status_code}")
            elif first.status_code == 200:
                self._check("a Completion with a key", first.json(), question)

    async def submit_jobs(self, until: asyncio.Event) -> None:
        """Submit Jobs, insisting on each, and cancel one in eight at a moment of its life."""
        while not until.is_set():
            question, key = self._chance.choice(self._questions), secrets.token_hex(8)
            response = await self._insist("job submit", "completion-jobs", question.body, key)
            if response is not None and response.status_code in (200, 202):
                job = AskedJob(response.json()["id"], question)
                self._seen.jobs.append(job)
                if self._chance.random() < 0.125:
                    await asyncio.sleep(self._chance.uniform(0, 3))
                    job.is_cancelled = True
                    await self._ask("job cancel", "POST", f"completion-jobs/{job.id}/cancel")
            await asyncio.sleep(self._chance.uniform(0.2, 2))

    async def harvest(self, until: asyncio.Event, body: dict[str, Any]) -> None:
        """Have one Harvest job after the other, each of the same corpus."""
        while not until.is_set():
            response = await self._insist("harvest submit", "harvest", body, secrets.token_hex(8))
            if response is None or response.status_code not in (200, 202):
                await asyncio.sleep(1)
                continue
            job_id = response.json()["job_id"]
            self._seen.harvests.append(job_id)
            while not until.is_set():
                answer = await self._ask("harvest wait", "GET", f"harvest/{job_id}", params={"wait": 5})
                if answer is None:
                    await asyncio.sleep(0.5)
                elif answer.json().get("status") in ("done", "failed", "cancelled"):
                    break

    async def read(self, path: str) -> httpx.Response | None:
        """Read something; None where the connection broke."""
        return await self._ask("read", "GET", path)

    # One request

    async def _insist(self, name: str, path: str, body: dict[str, Any], key: str) -> httpx.Response | None:
        """Ask under `key` until there is an answer that stands; None for a minute without one."""
        for _ in range(120):
            response = await self._ask(name, "POST", path, json=body, headers={"Idempotency-Key": key})
            if response is not None and not _is_worth_another_try(response):
                return response
            await asyncio.sleep(0.5)
        self._seen.answers[f"{name}: given up"] += 1
        return None

    async def _ask(self, name: str, method: str, path: str, **options: Any) -> httpx.Response | None:
        client = self._chance.choice(self._clients)
        try:
            response = await client.request(method, path, **options)
        except httpx.TransportError as error:
            self._seen.answers[f"{name}: {_reason(error)}"] += 1
            await self._wait_a_little()
            return None
        self._note(name, response)
        if response.status_code >= 500:
            await self._wait_a_little()
        return response

    async def _wait_a_little(self) -> None:
        """Be no client that asks a part that is down a hundred times a second."""
        await asyncio.sleep(self._chance.uniform(0.1, 0.8))

    async def _stream(self, question: Question) -> None:
        client = self._chance.choice(self._clients)
        body = question.body | {"stream": True, "stream_options": {"include_usage": True}}
        text, tokens, fault = "", 0, ""
        try:
            async with client.stream("POST", "completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._note("stream", response)
                    await self._wait_a_little()
                    return
                is_whole = False
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        is_whole = True
                    elif line:
                        chunk = json.loads(line.removeprefix("data: "))
                        fault = chunk.get("error", {}).get("code", "")
                        tokens = (chunk.get("usage") or {}).get("total_tokens", tokens)
                        text += "".join(choice["text"] for choice in chunk.get("choices", ()))
        except httpx.TransportError as error:
            self._seen.answers[f"stream: {_reason(error)}"] += 1
            await self._wait_a_little()
            return
        self._seen.answers[f"stream: 200 {fault or ('' if is_whole else 'cut short')}".strip()] += 1
        if is_whole:
            self._check("a stream", {"choices": [{"text": text}], "usage": {"total_tokens": tokens}}, question)
        elif fault not in {code for codes in HONEST.values() for code in codes}:
            self._fault(f"a stream ended early with {fault or 'nothing'}")

    async def _leave(self, question: Question) -> None:
        asking = asyncio.create_task(self._ask("left", "POST", "completions", json=question.body))
        await asyncio.wait([asking], timeout=self._chance.uniform(0, 0.5))
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])
        elif (response := asking.result()) is not None and response.status_code == 200:
            self._seen.whole[self.user.id] += response.json()["usage"]["total_tokens"]

    def _note(self, name: str, response: httpx.Response) -> None:
        status, code = response.status_code, ""
        if status >= 400:
            try:
                code = response.json()["error"]["code"]
            except (ValueError, KeyError, TypeError):
                code = "no error object"
            if code not in HONEST.get(status, ()):
                self._fault(f"{name} was answered {status} {code}: {response.text[:200]}")
        self._seen.answers[f"{name}: {status} {code}".strip()] += 1

    def _check(self, what: str, answer: dict[str, Any], question: Question) -> None:
        text, tokens = answer["choices"][0]["text"], answer["usage"]["total_tokens"]
        self._seen.whole[self.user.id] += tokens
        if (text, tokens) != (question.text, question.tokens):
            self._fault(f"{what} was wrong: {tokens} tokens for {question.tokens}, {text[:60]!r}")

    def _fault(self, sentence: str) -> None:
        self._seen.faults.append(sentence)


def _differ(first: httpx.Response, again: httpx.Response) -> bool:
    return (first.status_code, first.content) != (again.status_code, again.content)


def _is_worth_another_try(response: httpx.Response) -> bool:
    # A 502 or 504 of a Completion stands where its work had begun.
    return response.status_code in (409, 503)


def _reason(error: httpx.TransportError) -> str:
    return "no connection" if isinstance(error, httpx.ConnectError) else "connection broke"
