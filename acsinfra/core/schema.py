"""How the OpenAPI document is made of the views: what drf-spectacular cannot see by itself.

`documented` is the one decorator of the API's handlers. It adds to an operation what holds for every route below /v1
(the errors of the key, the rate and the parts that are away, the header X-Request-Id), so that a view names only what
is its own. The errors and their examples are in `acsinfra.core.schema_errors`, what belongs to no view in
`acsinfra.core.schema_document`.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.fields import empty
from rest_framework.serializers import Serializer

from acsinfra.core.errors import ErrorCode
from acsinfra.core.fields import INT64_MAX, INT64_MIN, StrictCharField, StrictSerializer
from acsinfra.core.schema_errors import ErrorAt, error_headers, error_responses

NO_NUL: Final = r"^[^\u0000]*$"
COMMON: Final[tuple[ErrorAt, ...]] = (
    ErrorCode.INVALID_REQUEST,
    ErrorCode.INVALID_API_KEY,
    ErrorCode.RATE_LIMITED,
    ErrorCode.INTERNAL_ERROR,
    ErrorCode.SERVICE_UNAVAILABLE,
)
OF_A_BODY: Final[tuple[ErrorAt, ...]] = (
    ErrorCode.BAD_JSON,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
)
REQUEST_ID: Final = OpenApiParameter(
    "X-Request-Id",
    {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    OpenApiParameter.HEADER,
    response=True,
    required=True,
    description="The id of this request. Send it when you report a problem.",
)


def documented(
    *,
    operation_id: str,
    tag: str,
    responses: Mapping[Any, Any],
    errors: Sequence[ErrorAt] = (),
    request: Any = empty,
    parameters: Sequence[OpenApiParameter] = (),
    examples: Mapping[str, Any] | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Describe a handler of the API; its docstring is the operation's text, the first line its title.

    `errors` are the codes of its own (those of COMMON, and with a body of JSON those of OF_A_BODY, come by
    themselves); `examples` are bodies of requests by their names. A test sends each of them.
    """
    takes_body = request is not empty and request is not None
    codes = (*COMMON, *(OF_A_BODY if takes_body else ()), *errors)
    return extend_schema(
        operation_id=operation_id,
        tags=[tag],
        request=request,
        parameters=[*parameters, REQUEST_ID, *error_headers(codes)],
        responses={**responses, **error_responses(codes)},
        examples=[OpenApiExample(name, value=body, request_only=True) for name, body in (examples or {}).items()],
        extensions=dict(extensions or {}),
    )


def response_header(name: str, *statuses: int, description: str, schema: Mapping[str, Any]) -> OpenApiParameter:
    """A header of the answers with `statuses`."""
    return OpenApiParameter(
        name, dict(schema), OpenApiParameter.HEADER, description=description, response=list(statuses)
    )


def page_parameters(noun: str, statuses: Sequence[str]) -> list[OpenApiParameter]:
    """The query of a list: `limit`, `after`, and what to choose by."""
    return [
        OpenApiParameter(
            "limit", {"type": "integer", "minimum": 1, "maximum": 100}, default=20, description=f"{noun}s in a page."
        ),
        OpenApiParameter("after", uuid.UUID, description=f"The id of the last {noun} of the page before."),
        OpenApiParameter("status", str, enum=list(statuses)),
        OpenApiParameter("model", {"type": "string", "pattern": NO_NUL}, description=f"Only {noun}s of this model."),
    ]


@dataclass(frozen=True, kw_only=True)
class WorkSchema:
    """What the routes of one kind of work share: it is submitted, listed, read and cancelled.

    `noun` is what the texts call it; `page` is the serializer of a list of `serializer`'s objects.
    """

    tag: str
    noun: str
    serializer: type[Serializer[Any]]
    page: type[Serializer[Any]]

    def answer(self, description: str, **examples: dict[str, Any]) -> OpenApiResponse:
        """An answer with the work, and examples of it by their names."""
        return _answer(self.serializer, description, examples)

    def documented_submit(
        self, *, parameters: Sequence[OpenApiParameter], responses: Mapping[Any, Any], **more: Any
    ) -> Callable[..., Any]:
        """The decorator of the POST, whose 202 says in `Location` where the work is."""
        location = response_header(
            "Location",
            202,
            description=f"The path of the {self.noun}.",
            schema={"type": "string", "format": "uri-reference"},
        )
        return documented(tag=self.tag, parameters=[*parameters, location], responses=responses, **more)

    def documented_list(
        self, *, operation_id: str, statuses: Sequence[str], example: dict[str, Any]
    ) -> Callable[..., Any]:
        """The decorator of the list; `example` is the one object of its example."""
        page = {"object": "list", "data": [example], "has_more": False}
        return documented(
            operation_id=operation_id,
            tag=self.tag,
            parameters=page_parameters(self.noun, statuses),
            responses={200: _answer(self.page, f"A page of {self.noun}s.", {f"{self.noun.lower()}s": page})},
        )

    def documented_get(
        self, *, operation_id: str, answer: OpenApiResponse, parameters: Sequence[OpenApiParameter] = ()
    ) -> Callable[..., Any]:
        """The decorator of the GET of one."""
        return documented(
            operation_id=operation_id,
            tag=self.tag,
            parameters=parameters,
            responses={200: answer},
            errors=[ErrorCode.NOT_FOUND],
        )

    def documented_cancel(
        self, *, operation_id: str, example: dict[str, Any], request: Any = None
    ) -> Callable[..., Any]:
        """The decorator of a route that cancels."""
        return documented(
            operation_id=operation_id,
            tag=self.tag,
            request=request,
            responses={200: self.answer(f"The {self.noun} as it is now.", cancelled=example)},
            errors=[ErrorCode.NOT_FOUND, ErrorCode.REQUEST_TOO_LARGE],
        )


def _answer(
    serializer: type[Serializer[Any]], description: str, examples: Mapping[str, dict[str, Any]]
) -> OpenApiResponse:
    shown = [OpenApiExample(name, value=value) for name, value in examples.items()]
    return OpenApiResponse(serializer, description=description, examples=shown)


class ApiSchema(AutoSchema):
    """The first sentence of a handler's docstring is the title, and an object of a request has no other fields."""

    def get_summary(self) -> str | None:
        """The docstring's first line without its full stop."""
        return self._docstring().split("\n", 1)[0].removesuffix(".") or None

    def get_description(self) -> str:  # type: ignore[override]
        """What follows the docstring's first line."""
        return self._docstring().partition("\n")[2].strip()

    def _docstring(self) -> str:
        text: str = super().get_description()
        return text

    def _map_basic_serializer(self, serializer: Any, direction: Any) -> dict[str, Any]:
        schema: dict[str, Any] = super()._map_basic_serializer(serializer, direction)  # type: ignore[no-untyped-call]
        if isinstance(serializer, StrictSerializer):
            schema["additionalProperties"] = False
        return schema

    def _insert_field_validators(self, field: Any, schema: dict[str, Any]) -> None:
        super()._insert_field_validators(field, schema)  # type: ignore[no-untyped-call]
        if isinstance(field, StrictCharField):
            schema["pattern"] = NO_NUL


class _StrictExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """What a strict field takes besides DRF's; a subclass says it in `add`."""

    target_class: Any = None
    match_subclasses = False

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The schema of the field, without its null, which drf-spectacular adds again."""
        mapped: dict[str, Any] = auto_schema._map_serializer_field(self.target, direction, bypass_extensions=True)
        if isinstance(mapped.get("type"), list):
            mapped["type"] = next(kind for kind in mapped["type"] if kind != "null")
        self.add(mapped)
        return mapped

    def add(self, mapped: dict[str, Any]) -> None:
        """Add to the schema."""


class StrictFloatExtension(_StrictExtension):  # type: ignore[no-untyped-call]
    """`above` as OpenAPI 3.1's `exclusiveMinimum`."""

    target_class = "acsinfra.core.fields.StrictFloatField"

    def add(self, mapped: dict[str, Any]) -> None:
        """Add the bound."""
        if self.target.above is not None:
            mapped["exclusiveMinimum"] = self.target.above


class StrictIntegerExtension(_StrictExtension):  # type: ignore[no-untyped-call]
    """Integers have 64 bits."""

    target_class = "acsinfra.core.fields.StrictIntegerField"

    def add(self, mapped: dict[str, Any]) -> None:
        """Add the bounds that the field itself does not have."""
        mapped.setdefault("minimum", INT64_MIN)
        mapped.setdefault("maximum", INT64_MAX)


class StrictListExtension(_StrictExtension):  # type: ignore[no-untyped-call]
    """A list whose items are distinct."""

    target_class = "acsinfra.core.fields.StrictListField"

    def add(self, mapped: dict[str, Any]) -> None:
        """Add that they are."""
        if self.target.distinct:
            mapped["uniqueItems"] = True
