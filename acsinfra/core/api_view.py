"""`ApiView`, the base of every view below /v1: key, rate, size, JSON, then the handler, with no thread in between."""

from typing import Any, ClassVar

from adrf.views import APIView
from django.core.exceptions import TooManyFieldsSent
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.body_limit import BODY_PASSED_LIMIT, BODY_STALLED
from acsinfra.core.errors import ApiError, ErrorCode, invalid
from acsinfra.core.parsers import check_content_type, parse_json
from acsinfra.core.renderers import render_json
from acsinfra.core.threads import in_thread_if

# Longer bodies are parsed and checked in threads: 10 MiB of token ids would stop every other request for a second.
PARSE_HERE_BYTES = 256 * 1024


def is_large(request: Request) -> bool:
    """Whether what reads all of the request's body belongs in a thread."""
    return len(request._request.body) > PARSE_HERE_BYTES


class ApiView(APIView):  # type: ignore[misc]
    """A view of the API. Its handlers (`get`, `post`, `delete`) are async and return DRF's Response or Django's.

    In a handler `request.user` is the User, `request.auth` the ApiKey, and, of a POST, `self.json` (also
    `request.data`) the object in the body. A view whose POST has no body sets `takes_json` to False.
    """

    takes_json: ClassVar[bool] = True
    # Django would look through the handlers for each request.
    view_is_async: ClassVar[bool] = True
    json: dict[str, Any]

    async def async_dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """DRF's dispatch, in the order of the API's checks."""
        self.args, self.kwargs = args, kwargs
        self.request = api_request = self.initialize_request(request, *args, **kwargs)
        self.headers = self.default_response_headers
        try:
            await self.admit(api_request)
            name = (api_request.method or "").lower()
            known = getattr(self, name, None) if name in self.http_method_names else None
            handler = known or self.http_method_not_allowed
            response = await handler(api_request, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 (DRF: each becomes an answer)
            response = self.handle_exception(error)
        return _as_http(response)

    async def admit(self, request: Request) -> None:
        """Check the key and its rate, then the size and the JSON of a body; raises ApiError."""
        authenticator: Any = self.authentication_classes[0]()
        request.user, request.auth = await authenticator.authenticate_async(request)
        scope = getattr(request._request, "scope", {})
        passed_limit = scope.get(BODY_PASSED_LIMIT)
        if passed_limit is not None:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE, f"The body is too large: at most {passed_limit:,} bytes are taken here."
            )
        if BODY_STALLED in scope:
            raise invalid(f"The body stopped coming: none of it came for {scope[BODY_STALLED]:g} s.")
        _check_query(request._request)
        if request.method == "POST" and self.takes_json and hasattr(self, "post"):
            check_content_type(request.headers)
            self.json = await in_thread_if(is_large(request), parse_json, request._request.body)
            request._full_data = self.json  # type: ignore[attr-defined]

    async def options(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """ApiMiddleware answers OPTIONS before any view."""
        return Response(status=204, headers={"Allow": ", ".join(self.allowed_methods)})


def _check_query(request: HttpRequest) -> None:
    try:
        fields = request.GET.lists()
    except TooManyFieldsSent:
        raise invalid("The query string has too many fields.") from None
    for name, texts in fields:
        if any("\x00" in text for text in (name, *texts)):
            raise invalid(f"{name!a} holds a NUL character.", param=name.replace("\x00", "\\u0000"))


def _as_http(response: HttpResponseBase) -> HttpResponseBase:
    # Django renders a DRF Response in a thread, even where it is rendered already.
    if not isinstance(response, Response):
        return response
    body = b"" if response.data is None else render_json(response.data)
    plain = HttpResponse(body, status=response.status_code, content_type="application/json")
    plain.error_code = getattr(response, "error_code", "")  # type: ignore[attr-defined]
    for name, value in response.items():
        if name != "Content-Type":
            plain[name] = value
    return plain
