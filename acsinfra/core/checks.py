"""What is missing or unsafe in the settings: shown by `manage.py check --deploy`, refused when a process starts."""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.core.checks import Error, Tags, register
from django.core.exceptions import ImproperlyConfigured

SECRET_KEY_CHARACTERS = 40
LOOPBACK = {"", "localhost", "127.0.0.1", "::1"}
ENCRYPTED_SSLMODES = {"require", "verify-ca", "verify-full"}


def require_settings(*, serves_http: bool) -> None:
    """Raise ImproperlyConfigured with every fault, one a line; workers are not asked about HTTP."""
    faults = [*_faults_of_parts(), *(_faults_of_http() if serves_http else ())]
    if faults:
        lines = "\n".join(f"- {fault.msg} {fault.hint}" for fault in faults)
        raise ImproperlyConfigured(f"These settings need attention before anything starts:\n{lines}")


@register(Tags.security, deploy=True)
def check_settings(app_configs: Sequence[Any] | None, **options: Any) -> list[Error]:
    """Django's system check."""
    return [*_faults_of_parts(), *_faults_of_http()]


def _faults_of_parts() -> Iterator[Error]:
    try:
        secret_key = settings.SECRET_KEY
    except ImproperlyConfigured:  # Django's own complaint, without the other faults
        secret_key = ""
    if len(secret_key) < SECRET_KEY_CHARACTERS or len(set(secret_key)) < 10:
        yield _fault(
            "SECRET_KEY is missing or weak.",
            'Make one: python -c "import secrets; print(secrets.token_urlsafe(50))".',
            "E001",
        )
    yield from _faults_of_database(settings.DATABASE_URL)
    yield from _faults_of_broker(settings.BROKER_URL)
    if urlsplit(settings.STORAGE_URL).scheme not in {"file", "s3"}:
        yield _fault(
            "STORAGE_URL is missing or is no storage.",
            "Give file:///folder or s3://bucket/prefix?endpoint=https://host&region=name.",
            "E004",
        )


def _faults_of_database(url: str) -> Iterator[Error]:
    try:
        parts = urlsplit(url)
        hosts, query = {parts.hostname or ""}, parse_qs(parts.query)
    except ValueError:
        parts, hosts, query = urlsplit(""), set(), {}
    if parts.scheme not in {"postgres", "postgresql"}:
        yield _fault(
            "DATABASE_URL is missing or is not PostgreSQL.", "Give postgresql://user:password@host:5432/name.", "E002"
        )
        return
    # A Unix socket's folder stands percent-encoded in the place of the host.
    is_local = all(host in LOOPBACK or host.lower().startswith("%2f") for host in hosts)
    is_encrypted = query.get("sslmode", [""])[-1] in ENCRYPTED_SSLMODES
    if not (is_local or is_encrypted or settings.ALLOW_PLAIN_SERVICES):
        yield _fault(
            "DATABASE_URL names another host without encryption.",
            "Add ?sslmode=verify-full (or require), or set ALLOW_PLAIN_SERVICES=true inside a trusted network.",
            "E003",
        )


def _faults_of_broker(url: str) -> Iterator[Error]:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if parts.scheme not in {"redis", "rediss"}:
        yield _fault("BROKER_URL is missing or is not Redis or Valkey.", "Give rediss://:password@host:6379/0.", "E005")
    elif parts.scheme == "redis" and host not in LOOPBACK and not settings.ALLOW_PLAIN_SERVICES:
        yield _fault(
            "BROKER_URL names another host without encryption.",
            "Use rediss://, or set ALLOW_PLAIN_SERVICES=true inside a trusted network.",
            "E006",
        )


def _faults_of_http() -> Iterator[Error]:
    if not settings.ALLOWED_HOSTS or "*" in settings.ALLOWED_HOSTS:
        yield _fault(
            "ALLOWED_HOSTS is missing or lets any host in.",
            "Name the hosts that this server answers for, separated by commas.",
            "E007",
        )
    if not (settings.BEHIND_TLS_PROXY or settings.ALLOW_PLAIN_HTTP):
        yield _fault(
            "Nothing says how HTTPS is made: keys and passwords would go in plain text.",
            "Set BEHIND_TLS_PROXY=true behind a proxy that sets X-Forwarded-Proto, or ALLOW_PLAIN_HTTP=true on a"
            " machine of your own.",
            "E008",
        )
    scheme = urlsplit(settings.PUBLIC_URL).scheme
    if settings.PUBLIC_URL and scheme != "https" and not (scheme == "http" and settings.ALLOW_PLAIN_HTTP):
        yield _fault(
            "PUBLIC_URL is not an https:// address.", "Give the address that people reach, https://host.", "E009"
        )


def _fault(message: str, hint: str, number: str) -> Error:
    return Error(message, hint=hint, id=f"acsinfra.{number}")
