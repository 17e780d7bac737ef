"""Where the server is and which key opens it, and the sending of a `Call` to it."""

import asyncio
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from acsinfra.client.errors import AcsError, invalid_argument
from acsinfra.client.retries import Retries

BASE_URL_VARIABLES: Final = ("ACS_BASE_URL", "ACS_API_BASE")
KEY_VARIABLE: Final = "ACS_API_KEY"
CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Server:
    """The API's address, with `/v1`, and the API key, which no text of this object shows."""

    base_url: str
    api_key: str = field(repr=False)

    @classmethod
    def of(cls, base_url: str | None, api_key: str | None) -> "Server":
        """The given ones, or those of the environment: `ACS_BASE_URL` (or `ACS_API_BASE`) and `ACS_API_KEY`.

        Raises AcsError (`invalid_argument`) where one is missing or cannot be one.
        """
        url = base_url or next((os.environ[name] for name in BASE_URL_VARIABLES if os.environ.get(name)), None)
        if not url:
            raise invalid_argument(
                "Where is the server? Set ACS_BASE_URL, such as http://127.0.0.1:8000/v1.", param="base_url"
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise invalid_argument("ACS_BASE_URL must be an http:// or https:// address.", param="base_url")
        key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise invalid_argument("Set ACS_API_KEY to your API key.", param="api_key")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise invalid_argument("ACS_API_KEY is not an API key: it has characters that no key has.", param="api_key")
        url = url.rstrip("/")
        return cls(url if url.endswith("/v1") else f"{url}/v1", key)

    def options(self, timeout_s: float) -> dict[str, Any]:
        """What an httpx client of this server is made with."""
        return {
            "base_url": f"{self.base_url}/",
            "headers": {"Authorization": f"Bearer {self.api_key}", "User-Agent": "acsinfra-client"},
            "timeout": httpx.Timeout(timeout_s, connect=CONNECT_SECONDS),
        }


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, as both clients send it. `content` is JSON; `is_repeatable` as in `Retries`.

    `timeout_s` is for an answer that never takes as long as a Completion may: a dead connection is noticed earlier.
    """

    method: str
    path: str
    content: bytes | None = None
    params: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    is_repeatable: bool = True
    never_codes: Collection[str] | None = None
    timeout_s: float | None = None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request of httpx."""
        headers = {"Content-Type": "application/json"} if self.content is not None else {}
        timeout = http.timeout if self.timeout_s is None else httpx.Timeout(self.timeout_s, connect=CONNECT_SECONDS)
        return http.build_request(
            self.method,
            self.path,
            content=self.content,
            params=self.params or None,
            headers=headers | self.headers,
            timeout=timeout,
        )

    def retries(self, patience_s: float) -> Retries:
        """The count of its retries."""
        retries = Retries(is_repeatable=self.is_repeatable, patience_s=patience_s)
        if self.never_codes is not None:
            retries.never_codes = self.never_codes
        return retries


def send(http: httpx.Client, call: Call, *, patience_s: float, stream: bool = False) -> httpx.Response:
    """Send the call until it is answered without an error; that answer. Raises AcsError."""
    retries = call.retries(patience_s)
    while True:
        try:
            answer = http.send(call.request(http), stream=stream)
            if answer.status_code < 400:
                return answer
            answer.read()
        except httpx.TransportError as failure:
            time.sleep(retries.pause_after_failure(failure, str(http.base_url)))
        except httpx.HTTPError as failure:
            raise _unreadable(failure) from failure
        else:
            time.sleep(retries.pause_after_answer(answer))


async def send_async(http: httpx.AsyncClient, call: Call, *, patience_s: float, stream: bool = False) -> httpx.Response:
    """`send`, for the async client."""
    retries = call.retries(patience_s)
    while True:
        try:
            answer = await http.send(call.request(http), stream=stream)
            if answer.status_code < 400:
                return answer
            await answer.aread()
        except httpx.TransportError as failure:
            await asyncio.sleep(retries.pause_after_failure(failure, str(http.base_url)))
        except httpx.HTTPError as failure:
            raise _unreadable(failure) from failure
        else:
            await asyncio.sleep(retries.pause_after_answer(answer))


def _unreadable(failure: httpx.HTTPError) -> AcsError:
    return AcsError(f"The server's answer cannot be read: {failure}", code="invalid_answer")
