"""Columns of the admin's lists that are read at a glance: numbers with their thousands, ids by their ends."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.utils.html import format_html

# A UUID is told from others by its start, which is its time, and its end, which the App shows too.
_START, _END = 8, 6


def number_column(field: str, description: str = "") -> Callable[[Any], str]:
    """The number in `field` with commas between its thousands; a dash for None."""

    @admin.display(description=description or field.replace("_", " "))
    def column(row: Any) -> str:
        value = getattr(row, field)
        return "-" if value is None else f"{value:,}"

    column.__name__ = field
    return column


def number_columns(*fields: str) -> tuple[Any, ...]:
    """A number_column for each field, for the pages of rows: django-stubs knows callables in lists alone."""
    return tuple(number_column(field) for field in fields)


def id_column(field: str = "id", description: str = "") -> Callable[[Any], str]:
    """The start and the end of the id in `field`, and the whole of it on pointing."""

    @admin.display(description=description or field.replace("_", " "))
    def column(row: Any) -> str:
        text = str(getattr(row, field))
        shown = text if len(text) <= 2 * (_START + _END) else f"{text[:_START]}…{text[-_END:]}"
        return format_html('<span title="{}">{}</span>', text, shown)

    column.__name__ = field
    return column
