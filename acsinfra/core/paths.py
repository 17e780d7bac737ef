"""Which paths belong to the API and which to the pages."""

API_ROOT = "/v1"
_SERVICE_PATHS = ("/healthz", "/readyz", "/metrics", "/openapi.json")


def is_api_path(path: str) -> bool:
    """Whether `path` lies below /v1: errors are JSON there and any origin may read."""
    return path == API_ROOT or path.startswith(f"{API_ROOT}/")


def is_page_path(path: str) -> bool:
    """Whether `path` is for a browser: sessions, CSRF and the Content-Security-Policy act there alone."""
    return not (is_api_path(path) or path in _SERVICE_PATHS or path.startswith("/files/"))
