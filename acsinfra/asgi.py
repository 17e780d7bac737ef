"""The ASGI application that uvicorn serves: `uvicorn acsinfra.asgi:application`."""

import os
from typing import cast

import django
from asgiref.typing import ASGI3Application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
django.setup(set_prefix=False)

from django.conf import settings  # noqa: E402

from acsinfra.core.body_limit import BodyLimit  # noqa: E402
from acsinfra.core.checks import require_settings  # noqa: E402
from acsinfra.core.handler import Handler  # noqa: E402
from acsinfra.core.lifespan import Lifespan  # noqa: E402


def body_limit_of(method: str, path: str) -> int:
    """The bytes that a body may have: a harvest's corpus is the one large thing that is sent here."""
    if method == "POST" and path == "/v1/harvest":
        return settings.MAX_HARVEST_BODY_BYTES
    return settings.MAX_BODY_BYTES


require_settings(serves_http=True)
application = Lifespan(BodyLimit(cast("ASGI3Application", Handler()), limit_of=body_limit_of))
