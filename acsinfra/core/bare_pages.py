"""Pages for what goes wrong before or beneath every other page: they need neither the database nor a session."""

import sys

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string

from acsinfra.core.errors import is_part_away

RETRY_AFTER_SECONDS = 5


def bare_page(title: str, text: str, *, status: int, request_id: str = "") -> HttpResponse:
    """A page of a title and a text."""
    shown = {"title": title, "text": text, "request_id": request_id}
    return HttpResponse(render_to_string("bare.html", shown), status=status)


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's `handler500`: a part that is away is a 503 that says so, anything else a 500 with its request id."""
    request_id = getattr(request, "request_id", "")
    if is_part_away(sys.exception()):
        text = "The database, the broker or the file storage does not answer just now. Try again in a moment."
        page = bare_page("Away for a moment", text, status=503, request_id=request_id)
        page["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return page
    return bare_page("Something went wrong", "It has been logged. Try again.", status=500, request_id=request_id)


def too_large_page() -> HttpResponse:
    """For a body past its limit."""
    return bare_page("Too large", "What was sent is larger than this page takes.", status=413)


def stalled_page() -> HttpResponse:
    """For a body that stopped coming."""
    return bare_page("It did not arrive", "What was sent stopped coming half-way. Try again.", status=400)


def bad_address_page() -> HttpResponse:
    """For an address that holds a NUL character."""
    return bare_page("Bad request", "The address cannot be read: it holds a NUL character.", status=400)


def wrong_method_page(allowed: str) -> HttpResponse:
    """For a method that a page does not take; a browser shows nothing of an answer without a body."""
    page = bare_page("Not this way", "This address does not take a request of this kind.", status=405)
    page["Allow"] = allowed
    return page
