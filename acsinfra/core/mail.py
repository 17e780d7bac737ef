"""How mail goes out, from one URL: `EMAIL_URL`."""

from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

SECONDS = 10
_HINT = "Give smtp://user:password@host:587 (STARTTLS), smtps://user:password@host, file:///folder or console:."


def mailer_from_url(url: str) -> dict[str, Any]:
    """Django's entry of MAILERS. `smtp://` asks for STARTTLS, but on this machine or with `?starttls=false`.

    Raises ImproperlyConfigured.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ImproperlyConfigured(f"EMAIL_URL cannot be read. {_HINT}") from None
    if parts.scheme == "console":
        return {"BACKEND": "django.core.mail.backends.console.EmailBackend"}
    if parts.scheme == "file" and parts.path:
        options: dict[str, Any] = {"file_path": unquote(parts.path)}
        return {"BACKEND": "django.core.mail.backends.filebased.EmailBackend", "OPTIONS": options}
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ImproperlyConfigured(f"EMAIL_URL names no way to send mail. {_HINT}")
    is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    starttls = parse_qs(parts.query).get("starttls", ["false" if is_local else "true"])[-1] != "false"
    options = {
        "host": parts.hostname,
        "port": port or (465 if parts.scheme == "smtps" else 25 if is_local else 587),
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "use_ssl": parts.scheme == "smtps",
        "use_tls": parts.scheme == "smtp" and starttls,
        "timeout": SECONDS,
    }
    return {"BACKEND": "django.core.mail.backends.smtp.EmailBackend", "OPTIONS": options}
