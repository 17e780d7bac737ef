"""JSON answers: compact UTF-8."""

import json
from collections.abc import Mapping
from typing import Any

from rest_framework.renderers import BaseRenderer


def render_json(value: object) -> bytes:
    """`value` as compact UTF-8 JSON; raises ValueError for NaN and infinities.

    A lone surrogate (it can only come from a request's own text) is written as the JSON escape that it came as.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JSONRenderer(BaseRenderer):
    """The one renderer of the API, whatever the Accept header says."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        """`data` as bytes; None is an empty body."""
        return b"" if data is None else render_json(data)
