"""Which paths belong to the API and which to the pages."""

import re

API_ROOT = "/v1"
_SECRET_BELOW = re.compile(r"^/(files|app/invitation|app/password/set)/[^/]+(/[^/]+)?")
_SERVICE_PATHS = ("/healthz", "/readyz", "/metrics", "/openapi.json")


def is_api_path(path: str) -> bool:
    """Whether `path` lies below /v1: errors are JSON there and any origin may read.

    So does `//v1/…`, what a client makes of a base URL that ends in a slash: no route, but a client's mistake.
    """
    return f"/{path.lstrip('/')}/".startswith(f"{API_ROOT}/")


def is_page_path(path: str) -> bool:
    """Whether `path` is for a browser: sessions, CSRF and the Content-Security-Policy act there alone."""
    return not (is_api_path(path) or path in _SERVICE_PATHS or path.startswith("/files/"))


def loggable_path(path: str) -> str:
    """`path` without what opens something to whoever reads it in a log: signed links, invitations, new passwords."""
    return _SECRET_BELOW.sub(r"/\1/…", path)
