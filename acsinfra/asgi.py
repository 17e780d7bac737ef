"""The ASGI application that uvicorn serves: `uvicorn acsinfra.asgi:application`."""

import os
from typing import cast

import django
from asgiref.typing import ASGI3Application, HTTPScope

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
django.setup(set_prefix=False)

from django.conf import settings  # noqa: E402

from acsinfra.core.body_limit import BodyLimit  # noqa: E402
from acsinfra.core.checks import require_settings  # noqa: E402
from acsinfra.core.handler import Handler  # noqa: E402
from acsinfra.core.lifespan import Lifespan  # noqa: E402
from acsinfra.core.paths import is_api_path  # noqa: E402


def body_limit_of(scope: HTTPScope) -> int:
    """The bytes that a body may have: a harvest's corpus is the one large thing that is sent here.

    Nothing is read of a request to the API that brings no key: its answer is a 401 whatever it sends.
    """
    if is_api_path(scope["path"]) and not any(name == b"authorization" for name, _ in scope["headers"]):
        return 0
    if scope["method"] == "POST" and scope["path"] == "/v1/harvest":
        return settings.MAX_HARVEST_BODY_BYTES
    return settings.MAX_BODY_BYTES


require_settings(serves_http=True)
application = Lifespan(BodyLimit(cast("ASGI3Application", Handler()), limit_of=body_limit_of))
