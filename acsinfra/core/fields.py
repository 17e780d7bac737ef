"""Strict fields: DRF's own trim, coerce and clamp in silence; these refuse, and name the field.

A field's `check(value)` returns the value or raises `FieldFault`; the containers around it put their names and indexes
before its `param`. Fields are shared by all requests and keep nothing. They are DRF fields so that drf-spectacular
documents them.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rest_framework import serializers
from rest_framework.fields import empty

from acsinfra.core.errors import ApiError, ErrorCode, invalid, printable

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class FieldFault(ApiError):
    """What is wrong with one value: `message` is the predicate of a sentence whose subject is the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message, param=param)


def within(name: str | int, error: ApiError) -> ApiError:
    """`error` as seen from the container that holds the faulty value under `name`."""
    error.param = str(name) if error.param is None else f"{name}.{error.param}"
    return error


def check_text(value: str) -> str:
    """`value`, or FieldFault when it holds a NUL character or a lone surrogate."""
    if "\0" in value:
        raise FieldFault("must not hold a NUL character.")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise FieldFault("must not hold a lone surrogate.") from None
    return value


class StrictField(serializers.Field):  # type: ignore[type-arg]
    """The base of strict fields. An optional one takes null as absence."""

    def __init__(self, **options: Any) -> None:
        if options.get("required") is False or "default" in options:
            options.setdefault("allow_null", True)
        super().__init__(**options)

    def check(self, value: Any) -> Any:
        """The checked value; raises FieldFault."""
        raise FieldFault("is not taken.")

    def run_validation(self, data: Any = empty) -> Any:
        """DRF's way in, as strict as ours."""
        return self.check(data)

    def to_internal_value(self, data: Any) -> Any:
        """DRF's way in, as strict as ours."""
        return self.check(data)


class StrictCharField(StrictField, serializers.CharField):
    """A string, as it is: `min_length` and `max_length` count code points; no NUL, no lone surrogate."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("trim_whitespace", False)
        options.setdefault("allow_blank", not options.get("min_length"))
        super().__init__(**options)

    def check(self, value: Any) -> str:
        """A string within the lengths."""
        if type(value) is not str:
            raise FieldFault("must be a string.")
        if self.min_length is not None and len(value) < self.min_length:
            raise FieldFault(
                "must not be empty." if self.min_length == 1 else f"must have at least {self.min_length} characters."
            )
        if self.max_length is not None and len(value) > self.max_length:
            raise FieldFault(f"must have at most {self.max_length:,} characters.")
        return check_text(value)


class StrictIntegerField(StrictField, serializers.IntegerField):
    """An integer (a bool is none, nor is 1.0) from `min_value` to `max_value`; without them, of 64 bits."""

    def check(self, value: Any) -> int:
        """An integer within the bounds."""
        if type(value) is not int:
            raise FieldFault("must be an integer.")
        low, high = self.bounds
        if self.max_value is None and value > high:
            raise FieldFault("is too large.")
        if not low <= value <= high:
            raise FieldFault(_out_of_range(self.min_value, self.max_value))
        return value

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value."""
        low = INT64_MIN if self.min_value is None else int(self.min_value)
        high = INT64_MAX if self.max_value is None else int(self.max_value)
        return low, high


class StrictFloatField(StrictField, serializers.FloatField):
    """A finite number from `min_value` to `max_value`, over `above` where that is given; a bool is no number."""

    def __init__(self, *, above: float | None = None, **options: Any) -> None:
        self.above = above
        super().__init__(**options)

    def check(self, value: Any) -> float:
        """A finite float within the bounds."""
        if type(value) is not float and type(value) is not int:
            raise FieldFault("must be a number.")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise FieldFault("must be a finite number.")
        is_low = self.min_value is not None and number < self.min_value
        is_high = self.max_value is not None and number > self.max_value
        if is_low or is_high or (self.above is not None and number <= self.above):
            raise FieldFault(_out_of_range(self.min_value, self.max_value, above=self.above))
        return number


class StrictBooleanField(StrictField, serializers.BooleanField):
    """true or false, nothing that resembles them."""

    def check(self, value: Any) -> bool:
        """A bool."""
        if type(value) is not bool:
            raise FieldFault("must be true or false.")
        return value


class StrictChoiceField(StrictField, serializers.ChoiceField):
    """One of the strings in `choices`, exactly."""

    def check(self, value: Any) -> str:
        """One of the choices."""
        if type(value) is not str or value not in self.choices:
            raise FieldFault(f"must be one of {', '.join(map(str, self.choices))}.")
        return value


class StrictListField(StrictField, serializers.ListField):
    """A list of `min_length` to `max_length` items, each as `child` says and, if `distinct`, there once.

    Lists of integers, and lists of those, are checked in one pass.
    """

    def __init__(self, *, child: Any, distinct: bool = False, **options: Any) -> None:
        self.distinct = distinct
        # DRF binds a child to its list; a copy lets several lists name one child.
        super().__init__(child=copy.deepcopy(child), **options)

    def check(self, value: Any) -> list[Any]:
        """A list of checked items."""
        if type(value) is not list:
            raise FieldFault("must be a list.")
        if self.min_length is not None and len(value) < self.min_length:
            raise FieldFault(
                "must not be empty." if self.min_length == 1 else f"must have at least {self.min_length} items."
            )
        if self.max_length is not None and len(value) > self.max_length:
            raise FieldFault(f"must have at most {self.max_length:,} items.")
        child: Any = self.child
        checked: list[Any] = []
        if _takes_all(child, value):
            checked = value
        else:
            for index, item in enumerate(value):
                try:
                    checked.append(child.check(item))
                except ApiError as error:
                    raise within(index, error) from None
        if self.distinct and len(set(checked)) != len(checked):
            seen: set[Any] = set()
            for index, item in enumerate(checked):
                if item in seen:
                    raise FieldFault("is given twice.", param=str(index))
                seen.add(item)
        return checked


def _takes_all(field: Any, values: list[Any]) -> bool:
    """Whether `field`, of integers or lists of them, takes each of `values`, found out in C. False: no, or unknown."""
    if type(field) is StrictIntegerField:
        return are_integers_within(values, *field.bounds)
    if type(field) is not StrictListField or field.distinct or set(map(type, values)) != {list}:
        return False
    lengths = set(map(len, values))
    longest = math.inf if field.max_length is None else field.max_length
    if min(lengths) < (field.min_length or 0) or max(lengths) > longest:
        return False
    return type(field.child) is StrictIntegerField and _takes_all(field.child, list(chain.from_iterable(values)))


def are_integers_within(values: Sequence[Any], low: int, high: int) -> bool:
    """Whether each of `values` is an int (no bool) from `low` to `high`: a pass in C over 32,000 token ids."""
    return not values or (set(map(type, values)) == {int} and low <= min(values) and max(values) <= high)


class StrictSerializer(serializers.Serializer):  # type: ignore[type-arg]
    """An object with known fields: `validated(body)` gives a dict of what was set and of the defaults, or ApiError.

    The first fault in the order of the fields is the one raised; an unknown field comes before all. An optional field
    without a default is absent from the dict when it was absent or null. Subclasses put rules that span fields into
    `check_object`. It nests: as a field of another serializer, or the child of a StrictListField.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("required") is False:
            options.setdefault("allow_null", True)
        super().__init__(*arguments, **options)

    @classmethod
    def validated(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        """`body` checked, or ApiError with `param`, its message beginning with it."""
        try:
            return cls.check(body)
        except FieldFault as fault:
            subject = fault.param or "The body"
            raise invalid(f"{subject} {fault.message}", param=fault.param) from None

    @classmethod
    def check(cls, value: Any) -> dict[str, Any]:
        """`value` checked; raises FieldFault (or another ApiError of `check_object`) with a relative `param`."""
        if not isinstance(value, dict):
            raise FieldFault("must be an object.")
        declared: Mapping[str, Any] = cls._declared_fields
        for name in value:
            if name not in declared:
                raise FieldFault("is not a known field.", param=printable(name))
        checked: dict[str, Any] = {}
        for name, field in declared.items():
            given = value.get(name)
            if given is None:
                if field.required:
                    raise FieldFault("is required.", param=name)
                if field.default is not empty:
                    checked[name] = field.default
                continue
            try:
                checked[name] = field.check(given)
            except ApiError as error:
                raise within(name, error) from None
        return cls.check_object(checked)

    @classmethod
    def check_object(cls, checked: dict[str, Any]) -> dict[str, Any]:
        """The place for rules that span fields: returns `checked`, or raises FieldFault or ApiError."""
        return checked

    def run_validation(self, data: Any = empty) -> Any:
        """DRF's way in, as strict as ours."""
        return self.validated({} if data is empty else data)


def query_integer(query: Mapping[str, str], name: str, *, default: int, min_value: int, max_value: int) -> int:
    """The integer `name` of a query string, `default` where it is absent; raises `400 invalid_request`."""
    text = query.get(name)
    if text is None:
        return default
    # int() takes spaces, underscores and other scripts' digits; here only ASCII digits count.
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and min_value <= int(text) <= max_value):
        raise invalid(f"{name} must be an integer from {min_value:,} to {max_value:,}.", param=name)
    return int(text)


def _out_of_range(low: Any, high: Any, *, above: float | None = None) -> str:
    parts = []
    if above is not None:
        parts.append(f"over {above:g}")
    elif low is not None:
        parts.append(f"at least {low:,}")
    if high is not None:
        parts.append(f"at most {high:,}")
    return f"must be {' and '.join(parts)}." if parts else "is too large."
