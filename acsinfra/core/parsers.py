"""Strict JSON bodies: UTF-8, one value for each key, no NaN, an object at the top."""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from email.message import Message
from typing import IO, Any

from rest_framework.parsers import BaseParser

from acsinfra.core.errors import ApiError, ErrorCode, invalid, printable

MAX_DEPTH = 32
# Python refuses to read integers of more than 4,300 digits; one this long is out of every field's range anyway.
_LONG_INTEGER = 10**400


class _Repeated(dict[str, Any]):
    """An object in which `key` stood twice."""

    def __init__(self, pairs: list[tuple[str, Any]], key: str) -> None:
        super().__init__(pairs)
        self.key = key


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, or ApiError: `bad_json`, or `invalid_request` for a repeated key or another value."""
    if not body:
        raise _bad_json("The body is empty: it must be a JSON object.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise _bad_json("The body is not valid UTF-8.") from None
    found_repeated = False

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found_repeated
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        found_repeated = True
        return _Repeated(pairs, _first_repeated(key for key, _ in pairs))

    try:
        try:
            value = json.loads(text, object_pairs_hook=make_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError:
            raise
        except ValueError:
            value = json.loads(
                text, object_pairs_hook=make_object, parse_constant=_refuse_constant, parse_int=_read_integer
            )
    except json.JSONDecodeError as error:
        raise _bad_json(f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise _too_deep() from None
    if _is_deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    if found_repeated:
        param = _path_to_repeated(value)
        raise invalid(f"The key {param} is in the body twice.", param=param)
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    return value


def check_content_type(headers: Mapping[str, str]) -> None:
    """Raise `415 unsupported_media_type` for a body that is declared as anything but uncompressed JSON in UTF-8."""
    declared = headers.get("Content-Type", "")
    if declared.strip():
        message = Message()
        try:
            message["Content-Type"] = declared
            media_type, charset = message.get_content_type(), message.get_param("charset", "utf-8")
        except (ValueError, LookupError, TypeError):
            media_type, charset = "", ""
        is_utf8 = isinstance(charset, str) and charset.lower().replace("_", "-") in {"utf-8", "utf8"}
        if media_type != "application/json" or not is_utf8:
            raise ApiError(
                ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The body must be sent with Content-Type: application/json, in UTF-8."
            )
    if headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
        raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "A body with a Content-Encoding is not taken.")


class StrictJSONParser(BaseParser):
    """`parse_json` for DRF."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The JSON object in `stream`."""
        return parse_json(stream.read())


def _bad_json(message: str) -> ApiError:
    return ApiError(ErrorCode.BAD_JSON, message)


def _too_deep() -> ApiError:
    return _bad_json(f"The body's JSON is nested more than {MAX_DEPTH} levels deep.")


def _refuse_constant(literal: str) -> None:
    raise _bad_json(f"The body is not JSON: {literal} is not a JSON value.")


def _read_integer(digits: str) -> int:
    if len(digits) <= 400:
        return int(digits)
    return -_LONG_INTEGER if digits.startswith("-") else _LONG_INTEGER


def _is_deeper_than(value: object, limit: int) -> bool:
    level: list[dict[str, object] | list[object]] = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        below: list[dict[str, object] | list[object]] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            # One pass in C over long lists of token ids, which hold no containers.
            if not {dict, list, _Repeated}.isdisjoint(map(type, items)):
                below.extend(item for item in items if isinstance(item, dict | list))
        if not below:
            return False
        level = below
    return True


def _first_repeated(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise ValueError("no key stands twice")


def _path_to_repeated(value: object) -> str | None:
    waiting: deque[tuple[str, object]] = deque([("", value)])
    while waiting:
        path, item = waiting.popleft()
        if isinstance(item, _Repeated):
            return path + printable(item.key)
        items = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        waiting.extend((f"{path}{printable(str(k))}.", v) for k, v in items if isinstance(v, dict | list))
    return None
