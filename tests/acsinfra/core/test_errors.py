"""Every failure has its error object, and what is unexpected says nothing of itself."""

import json
import logging

import psycopg
import pytest
import redis.exceptions
from django.core.exceptions import PermissionDenied, SuspiciousOperation, TooManyFieldsSent
from django.db import InterfaceError, OperationalError
from django.http import Http404
from kombu.exceptions import OperationalError as BrokerError
from psycopg_pool import PoolTimeout
from rest_framework import exceptions as drf

from acsinfra.core.errors import STATUS_OF_CODE, ApiError, ErrorCode, api_error_of, exception_handler, printable
from acsinfra.core.renderers import render_json
from acsinfra.core.storage import StorageUnavailableError


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (drf.MethodNotAllowed("PUT"), 405, "method_not_allowed"),
        (drf.NotAuthenticated(), 401, "invalid_api_key"),
        (drf.AuthenticationFailed(), 401, "invalid_api_key"),
        (drf.UnsupportedMediaType("text/plain"), 415, "unsupported_media_type"),
        (drf.ParseError(), 400, "bad_json"),
        (drf.NotFound(), 404, "not_found"),
        (Http404(), 404, "not_found"),
        (SuspiciousOperation("x"), 400, "invalid_request"),
        (TooManyFieldsSent("x"), 400, "invalid_request"),
        (drf.ValidationError({"a": "b"}), 400, "invalid_request"),
        (ApiError(ErrorCode.ENGINE_ERROR, "It broke."), 502, "engine_error"),
        (psycopg.OperationalError("secret"), 503, "service_unavailable"),
        (psycopg.InterfaceError("secret"), 503, "service_unavailable"),
        (PoolTimeout("secret"), 503, "service_unavailable"),
        (OperationalError("secret"), 503, "service_unavailable"),
        (InterfaceError("secret"), 503, "service_unavailable"),
        (redis.exceptions.ConnectionError("secret"), 503, "service_unavailable"),
        (redis.exceptions.BusyLoadingError("secret"), 503, "service_unavailable"),
        (redis.exceptions.TimeoutError("secret"), 503, "service_unavailable"),
        (BrokerError("secret"), 503, "service_unavailable"),
        (StorageUnavailableError("secret"), 503, "service_unavailable"),
        (ConnectionResetError("secret"), 503, "service_unavailable"),
        (psycopg.errors.UniqueViolation("secret"), 500, "internal_error"),
        (PermissionDenied("secret"), 500, "internal_error"),
        (KeyError("secret"), 500, "internal_error"),
        (RecursionError("secret"), 500, "internal_error"),
    ],
)
def test_each_failure_has_its_answer(error: Exception, status: int, code: str) -> None:
    response = exception_handler(error, {})
    assert (response.status_code, response.data["error"]["code"]) == (status, code)
    assert response.data["error"].keys() == {"message", "type", "code", "param"}
    assert "secret" not in json.dumps(response.data)


def test_an_unexpected_error_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        api_error_of(error)
    [formatter] = [
        handler.formatter for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler
    ]
    assert formatter is not None
    line = json.loads(formatter.format(caplog.records[-1]))
    assert line["event"] == "unexpected error"
    assert "KeyError: 'the cause'" in line["exception"]
    assert "Traceback" in line["exception"]


@pytest.mark.parametrize("code", ErrorCode)
def test_the_type_goes_with_the_status(code: ErrorCode) -> None:
    error = ApiError(code, "Words.", param="a.0", extra={"job_id": "j"})
    status = STATUS_OF_CODE.get(code, 400)
    types = {401: "authentication_error", 429: "rate_limit_error"}
    expected = types.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert error.body() == {
        "error": {"message": "Words.", "type": expected, "code": code.value, "param": "a.0"},
        "job_id": "j",
    }


def test_names_out_of_a_request_are_made_printable() -> None:
    assert printable("a\ud800\0b") == "a\\ud800\\u0000b"
    assert len(printable("x" * 1_000_000)) == 101


def test_answers_are_compact_utf8_json() -> None:
    assert render_json({"a": "é", "b": [1, None]}) == '{"a":"é","b":[1,null]}'.encode()
    assert json.loads(render_json({"a": "\ud800"})) == {"a": "\ud800"}
    with pytest.raises(ValueError, match="Out of range"):
        render_json(float("nan"))
