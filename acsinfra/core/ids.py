"""The ids that the API gives out."""

import uuid

import uuid_utils
from django.urls.converters import UUIDConverter


def new_uuid7() -> uuid.UUID:
    """A UUIDv7: it carries its time of making, so that rows made later sort later."""
    return uuid.UUID(int=uuid_utils.uuid7().int)


def new_request_id() -> str:
    """`req_` and 32 hex digits: the `X-Request-Id` of one answer."""
    return f"req_{uuid.uuid4().hex}"


class AnyCaseUUIDConverter(UUIDConverter):
    """Django's `uuid` path converter, with capital letters taken too; what does not match is a 404."""

    regex = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
