"""Strict fields: nothing is trimmed, coerced or clamped, and `param` names what is wrong."""

import math
import time
from typing import Any

import pytest
from django.urls import path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from hypothesis import given
from hypothesis import strategies as st
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.fields import (
    FieldFault,
    StrictBooleanField,
    StrictCharField,
    StrictChoiceField,
    StrictFloatField,
    StrictIntegerField,
    StrictListField,
    StrictSerializer,
    query_integer,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
any_text = st.text(st.characters(codec=None))


class Vector(StrictSerializer):
    layer_indices = StrictListField(child=StrictIntegerField(min_value=0, max_value=99), min_length=1, max_length=4)
    scale = StrictFloatField(min_value=-1e6, max_value=1e6, default=1.0)


class Body(StrictSerializer):
    model = StrictCharField(min_length=1, max_length=20)
    n = StrictIntegerField(min_value=1, max_value=16, default=1)
    top_p = StrictFloatField(above=0, max_value=1, required=False)
    stream = StrictBooleanField(default=False)
    mode = StrictChoiceField(choices=["fast", "slow"], required=False)
    ids = StrictListField(child=StrictIntegerField(min_value=0, max_value=49_999), max_length=32_000, required=False)
    texts = StrictListField(child=StrictCharField(min_length=1), required=False)
    vectors = StrictListField(child=Vector(), max_length=8, required=False)
    one = Vector(required=False)

    @classmethod
    def check_object(cls, checked: dict[str, Any]) -> dict[str, Any]:
        if checked["stream"] and checked["n"] > 8:
            raise FieldFault("must be at most 8 with stream.", param="n")
        return checked


def fault_of(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        Body.validated({"model": "m", **body})
    return caught.value


def checked_or_error(body: dict[str, Any]) -> dict[str, Any] | ApiError:
    try:
        return Body.validated(body)
    except ApiError as error:
        return error


def test_a_valid_body_gives_what_was_set_and_the_defaults() -> None:
    assert Body.validated({"model": "m"}) == {"model": "m", "n": 1, "stream": False}
    body = {"model": " m ", "top_p": 1, "ids": [0, 49_999], "vectors": [{"layer_indices": [3]}], "one": None}
    assert Body.validated(body) == {
        "model": " m ",
        "n": 1,
        "top_p": 1.0,
        "stream": False,
        "ids": [0, 49_999],
        "vectors": [{"layer_indices": [3], "scale": 1.0}],
    }


def test_null_in_an_optional_field_is_absence() -> None:
    nothing = dict.fromkeys(["n", "top_p", "stream", "mode", "ids", "texts", "vectors", "one"])
    assert Body.validated({"model": "m", **nothing}) == Body.validated({"model": "m"})
    assert fault_of(model=None).param == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"nn": 1}, "nn"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "1"}, "n"),
        ({"n": 0}, "n"),
        ({"n": 10**5000}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": False}, "top_p"),
        ({"top_p": math.inf}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": 10**400}, "top_p"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"mode": "Fast"}, "mode"),
        ({"mode": ["fast"]}, "mode"),
        ({"model": ""}, "model"),
        ({"model": "x" * 21}, "model"),
        ({"model": "a\0"}, "model"),
        ({"model": "a\ud800"}, "model"),
        ({"ids": [1, 2, True]}, "ids.2"),
        ({"ids": [1, -1]}, "ids.1"),
        ({"ids": [1, 2.0]}, "ids.1"),
        ({"ids": "1"}, "ids"),
        ({"ids": {"0": 1}}, "ids"),
        ({"ids": [1] * 32_001}, "ids"),
        ({"texts": ["a", ""]}, "texts.1"),
        ({"texts": ["a", None]}, "texts.1"),
        ({"vectors": [{"layer_indices": [1]}, {"layer_indices": [1], "scale": "2"}]}, "vectors.1.scale"),
        ({"vectors": [{"layer_indices": [1, 100]}]}, "vectors.0.layer_indices.1"),
        ({"vectors": [{"layer_indices": []}]}, "vectors.0.layer_indices"),
        ({"vectors": [{}]}, "vectors.0.layer_indices"),
        ({"vectors": [[]]}, "vectors.0"),
        ({"one": {"layer_indices": [1], "x": 1}}, "one.x"),
        ({"stream": True, "n": 9}, "n"),
    ],
)
def test_a_fault_names_its_field(body: dict[str, Any], param: str) -> None:
    error = fault_of(**body)
    assert (error.code, error.status, error.param) == (ErrorCode.INVALID_REQUEST, 400, param)
    assert error.message.startswith(f"{param} ")
    assert len(error.message) < 300


def test_the_first_fault_in_the_order_of_the_fields_is_told() -> None:
    assert fault_of(stream=3, n=0).param == "n"
    assert fault_of(stream=3, n=0, unknown=1).param == "unknown"


@given(st.text(st.characters(codec=None), min_size=1).filter(lambda name: name not in Body._declared_fields))
def test_an_unknown_name_of_any_kind_is_told_in_printable_text(name: str) -> None:
    error = fault_of(**{name: 1})
    assert error.param is not None
    error.message.encode("utf-8")
    assert "\0" not in error.message


@given(any_text)
def test_text_is_taken_as_it_is_unless_it_cannot_be_stored(text: str) -> None:
    is_storable = "\0" not in text and not any(0xD800 <= ord(character) <= 0xDFFF for character in text)
    field = StrictCharField()
    if is_storable:
        assert field.check(text) == text
    else:
        with pytest.raises(FieldFault):
            field.check(text)


@given(json_values)
def test_an_integer_field_takes_integers_in_range_alone(value: Any) -> None:
    field = StrictIntegerField(min_value=-5, max_value=300)
    if type(value) is int and -5 <= value <= 300:
        assert field.check(value) is value
    else:
        with pytest.raises(FieldFault):
            field.check(value)


@given(json_values)
def test_a_float_field_takes_finite_numbers_in_range_alone(value: Any) -> None:
    field = StrictFloatField(above=-2, max_value=1e9)
    if type(value) in (int, float) and math.isfinite(value) and -2 < value <= 1e9:
        checked = field.check(value)
        assert type(checked) is float
        assert checked == value
    else:
        with pytest.raises(FieldFault):
            field.check(value)


@given(st.lists(json_values, max_size=6))
def test_a_list_is_checked_alike_on_the_short_way_and_the_long_one(items: list[Any]) -> None:
    child = StrictIntegerField(min_value=0, max_value=10)
    first_fault = next((i for i, v in enumerate(items) if type(v) is not int or not 0 <= v <= 10), None)
    if first_fault is None:
        assert StrictListField(child=child).check(items) == items
    else:
        with pytest.raises(ApiError) as caught:
            StrictListField(child=child).check(items)
        assert caught.value.param == str(first_fault)


@given(st.lists(st.one_of(json_values, st.lists(st.integers(-1, 11), max_size=3)), max_size=5))
def test_a_list_of_lists_is_checked_alike_on_the_short_way_and_the_long_one(items: list[Any]) -> None:
    inner = StrictListField(child=StrictIntegerField(min_value=0, max_value=10), min_length=1, max_length=2)

    def is_wrong(item: Any) -> bool:
        try:
            inner.check(item)
        except ApiError:
            return True
        return False

    first_fault = next((i for i, item in enumerate(items) if is_wrong(item)), None)
    if first_fault is None:
        assert StrictListField(child=inner).check(items) == items
    else:
        with pytest.raises(ApiError) as caught:
            StrictListField(child=inner).check(items)
        assert (caught.value.param or "").split(".")[0] == str(first_fault)


@given(
    st.dictionaries(
        st.sampled_from(["model", "n", "top_p", "stream", "ids", "texts", "vectors", "one", "x"]), json_values
    )
)
def test_any_object_is_valid_or_an_invalid_request(body: dict[str, Any]) -> None:
    outcome = checked_or_error(body)
    if isinstance(outcome, ApiError):
        assert outcome.code is ErrorCode.INVALID_REQUEST
        assert outcome.param is not None
    else:
        assert outcome.keys() <= Body._declared_fields.keys()


def test_large_bodies_are_checked_in_milliseconds() -> None:
    ids, texts = list(range(32_000)), ["some text é"] * 4_096

    def seconds() -> float:
        """CPU time of this thread alone: servers of other tests run in this process."""
        started = time.thread_time()
        Body.validated({"model": "m", "ids": ids, "texts": texts})
        return time.thread_time() - started

    # The least of some: a collection of all of the tests' garbage may fall into one.
    assert min(seconds() for _ in range(5)) < 0.1


@pytest.mark.parametrize("text", ["", " 5", "5 ", "+5", "5.0", "1_0", "٥", "0x5", "-1", "61", "9" * 5_000, "--5"])
def test_a_query_integer_is_ascii_digits_in_range(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        query_integer({"wait": text}, "wait", default=0, min_value=0, max_value=60)
    assert caught.value.param == "wait"


def test_a_query_integer_in_range_is_read() -> None:
    assert query_integer({"wait": "60"}, "wait", default=0, min_value=0, max_value=60) == 60
    assert query_integer({"n": "-3"}, "n", default=0, min_value=-5, max_value=60) == -3
    assert query_integer({}, "wait", default=7, min_value=0, max_value=60) == 7


def test_drf_validates_by_the_same_rules() -> None:
    assert Body().run_validation({"model": "m"})["n"] == 1
    with pytest.raises(ApiError):
        Body().run_validation({"model": " m ", "n": "1"})
    with pytest.raises(ApiError):
        StrictIntegerField().run_validation("5")


class BodyView(ApiView):
    @extend_schema(request=Body, responses=None)
    async def post(self, request: Request) -> Response:
        return Response(Body.validated(self.json))


def test_the_bounds_are_in_the_openapi_schema() -> None:
    generator = SchemaGenerator(patterns=[path("v1/bodies", BodyView.as_view())])  # type: ignore[no-untyped-call]
    schema = generator.get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    assert schema["paths"]["/v1/bodies"]["post"]["security"] == [{"bearer": []}]
    body = schema["components"]["schemas"]["Body"]
    properties = body["properties"]
    assert body["required"] == ["model"]
    assert (properties["n"]["minimum"], properties["n"]["maximum"], properties["n"]["default"]) == (1, 16, 1)
    assert properties["ids"]["maxItems"] == 32_000
    assert properties["ids"]["items"]["maximum"] == 49_999
    assert "null" in properties["ids"]["type"]
    assert properties["model"] == {"type": "string", "minLength": 1, "maxLength": 20, "pattern": r"^[^\u0000]*$"}
    assert (properties["top_p"]["exclusiveMinimum"], properties["top_p"]["maximum"]) == (0, 1)
