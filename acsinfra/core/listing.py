"""Lists of a User's work, newest first, a page at a time: `{"object": "list", "data": [...], "has_more": bool}`."""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Model, QuerySet

from acsinfra.core.errors import invalid
from acsinfra.core.fields import query_integer

LIMIT_DEFAULT: Final = 20
LIMIT_AT_MOST: Final = 100


@dataclass(frozen=True, kw_only=True)
class ListQuery:
    """What a list was asked for: at most `limit` rows older than the row `after`, of this status and model."""

    limit: int = LIMIT_DEFAULT
    after: uuid.UUID | None = None
    status: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Page[Row]:
    """A page of rows, newest first, and whether older ones follow."""

    rows: Sequence[Row]
    has_more: bool

    def as_json(self, row_as_json: Callable[[Row], Any]) -> dict[str, Any]:
        """The answer, with each row as `row_as_json` makes it."""
        return {"object": "list", "data": [row_as_json(row) for row in self.rows], "has_more": self.has_more}


def read_list_query(query: Mapping[str, str], *, statuses: Collection[str], noun: str) -> ListQuery:
    """Read the query parameters. Raises `400 invalid_request`."""
    limit = query_integer(query, "limit", default=LIMIT_DEFAULT, min_value=1, max_value=LIMIT_AT_MOST)
    status = query.get("status")
    if status is not None and status not in statuses:
        raise invalid(f"status must be one of {', '.join(statuses)}.", param="status")
    after = None if (text := query.get("after")) is None else _read_id(text, noun)
    return ListQuery(limit=limit, after=after, status=status, model=query.get("model"))


def list_page[Row: Model](rows: QuerySet[Row], asked: ListQuery, *, noun: str) -> Page[Row]:
    """The page of a User's `rows`, whose ids are UUIDv7. Raises `400` for an `after` that is none of theirs."""
    found = rows
    if asked.after is not None:
        if not rows.filter(pk=asked.after).exists():
            raise invalid(f"after is not the id of one of your {noun}s.", param="after")
        found = found.filter(pk__lt=asked.after)
    if asked.status is not None:
        found = found.filter(status=asked.status)
    if asked.model is not None:
        found = found.filter(model=asked.model)
    page = list(found.order_by("-pk")[: asked.limit + 1])
    return Page(page[: asked.limit], len(page) > asked.limit)


def _read_id(text: str, noun: str) -> uuid.UUID:
    try:
        if len(text) == 36:
            return uuid.UUID(text)
    except ValueError:
        pass
    raise invalid(f"after must be the id of a {noun}.", param="after")
