"""Bodies are JSON objects in UTF-8, or an error that says what they are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.parsers import MAX_DEPTH, check_content_type, parse_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def fault_of(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    return caught.value


def read_or_error(body: bytes) -> dict[str, Any] | ApiError:
    try:
        return parse_json(body)
    except ApiError as error:
        return error


@given(st.dictionaries(st.text(), values))
def test_every_json_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_an_object_or_an_api_error(body: bytes) -> None:
    outcome = read_or_error(body)
    if isinstance(outcome, ApiError):
        assert outcome.code in {ErrorCode.BAD_JSON, ErrorCode.INVALID_REQUEST}
    else:
        assert outcome == json.loads(body)


@given(scalars | st.lists(values))
def test_other_values_are_no_request(value: Any) -> None:
    error = fault_of(json.dumps(value).encode())
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"a":1}}',
        b"{'a':1}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e}',
        b'{"a":01}',
        b'{"a":"\x01"}',
        b'{"a":"\xff"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32"),
        b"\x1f\x8b\x08\x00",
        b'{"a":"\\ud800',
    ],
)
def test_what_is_not_json_in_utf8_is_bad_json(body: bytes) -> None:
    assert fault_of(body).code is ErrorCode.BAD_JSON


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_is_bounded_whatever_its_depth() -> None:
    assert parse_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 1_000, 100_000, 1_000_000):
        assert fault_of(nested(depth)).code is ErrorCode.BAD_JSON
    assert fault_of(b'{"a":' * 100_000).code is ErrorCode.BAD_JSON
    assert fault_of(b'{"a":' * 40 + b"1" + b"}" * 40).code is ErrorCode.BAD_JSON


@pytest.mark.parametrize("digits", [400, 4_300, 4_301, 100_000])
def test_integers_of_any_length_are_left_to_the_fields(digits: int) -> None:
    read = parse_json(b'{"a": -%s, "b": 7}' % (b"9" * digits))
    assert read["a"] < -(2**64)
    assert read["b"] == 7


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"a":1,"a":1}', "a"),
        ('{"a":1,"b":2,"\\u0061":3}', "a"),
        ('{"a":{"b":[{},{"c":1,"d":2,"d":3}]}}', "a.b.1.d"),
        ('{"a":{"b":1,"b":2},"a":3}', "a"),
        ('[{"x":1,"x":1}]', "0.x"),
        ('{"\\ud800":1,"\\ud800":2}', "\\ud800"),
    ],
)
def test_a_repeated_key_is_refused_by_its_path(body: str, param: str) -> None:
    error = fault_of(body.encode())
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, param)


def test_a_repeated_key_among_a_million_is_found_at_once() -> None:
    body = b"{" + b",".join(b'"k%d":[]' % i for i in range(200_000)) + b',"k199999":1}'
    assert fault_of(body).param == "k199999"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": ""},
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/JSON"},
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": 'application/json;charset="UTF8"'},
        {"Content-Encoding": "identity"},
    ],
)
def test_json_in_utf8_is_taken_declared_or_not(headers: dict[str, str]) -> None:
    check_content_type(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json, text/html"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json; charset*=rot13''x"},
        {"Content-Type": "json"},
        {"Content-Type": ";;;"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "identity, gzip"},
    ],
)
def test_other_media_types_and_encodings_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        check_content_type(headers)
    assert (caught.value.status, caught.value.code) == (415, ErrorCode.UNSUPPORTED_MEDIA_TYPE)
