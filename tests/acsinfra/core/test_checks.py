"""A process refuses to start on settings that are missing or unsafe, and says what to do about each."""

import os
import subprocess
import sys
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from acsinfra.core.checks import check_settings, require_settings
from acsinfra.quickstart.supervisor import PROJECT

SAFE = {
    "SECRET_KEY": "".join(map(chr, range(48, 110))),
    "DATABASE_URL": "postgresql://u:p@db.example:5432/x?sslmode=verify-full",
    "BROKER_URL": "rediss://:p@broker.example:6379/0",
    "STORAGE_URL": "s3://bucket/prefix?endpoint=https://s3.example",
    "ALLOWED_HOSTS": ["api.example"],
    "BEHIND_TLS_PROXY": True,
    "ALLOW_PLAIN_HTTP": False,
    "ALLOW_PLAIN_SERVICES": False,
    "PUBLIC_URL": "https://api.example",
}


def ids_with(settings: Any, **changes: Any) -> list[str]:
    for name, value in {**SAFE, **changes}.items():
        setattr(settings, name, value)
    return [str(fault.id).removeprefix("acsinfra.") for fault in check_settings(None)]


def test_safe_settings_have_no_fault(settings: Any) -> None:
    assert ids_with(settings) == []
    require_settings(serves_http=True)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"SECRET_KEY": ""}, ["E001"]),
        ({"SECRET_KEY": "short"}, ["E001"]),
        ({"SECRET_KEY": "a" * 60}, ["E001"]),
        ({"DATABASE_URL": ""}, ["E002"]),
        ({"DATABASE_URL": "sqlite:///x"}, ["E002"]),
        ({"DATABASE_URL": "postgresql://[::1"}, ["E002"]),
        ({"DATABASE_URL": "postgresql://u@db.example/x"}, ["E003"]),
        ({"DATABASE_URL": "postgresql://u@db.example/x?sslmode=prefer"}, ["E003"]),
        ({"DATABASE_URL": "postgresql://u@db.example/x", "ALLOW_PLAIN_SERVICES": True}, []),
        ({"DATABASE_URL": "postgresql://u@db.example/x?sslmode=require"}, []),
        ({"DATABASE_URL": "postgres://u@127.0.0.1:5432/x"}, []),
        ({"DATABASE_URL": "postgres://u@%2Fvar%2Frun/x"}, []),
        ({"STORAGE_URL": ""}, ["E004"]),
        ({"STORAGE_URL": "/tmp/files"}, ["E004"]),
        ({"STORAGE_URL": "file:///srv/files"}, []),
        ({"BROKER_URL": ""}, ["E005"]),
        ({"BROKER_URL": "amqp://host"}, ["E005"]),
        ({"BROKER_URL": "redis://broker.example:6379/0"}, ["E006"]),
        ({"BROKER_URL": "redis://broker.example:6379/0", "ALLOW_PLAIN_SERVICES": True}, []),
        ({"BROKER_URL": "redis://localhost:6379/0"}, []),
        ({"ALLOWED_HOSTS": []}, ["E007"]),
        ({"ALLOWED_HOSTS": ["*"]}, ["E007"]),
        ({"BEHIND_TLS_PROXY": False}, ["E008"]),
        ({"BEHIND_TLS_PROXY": False, "ALLOW_PLAIN_HTTP": True}, []),
        ({"PUBLIC_URL": "http://api.example"}, ["E009"]),
        ({"PUBLIC_URL": "ftp://api.example", "ALLOW_PLAIN_HTTP": True}, ["E009"]),
        ({"PUBLIC_URL": "http://api.example", "ALLOW_PLAIN_HTTP": True}, []),
        ({"PUBLIC_URL": ""}, []),
    ],
)
def test_each_fault_is_found(settings: Any, changes: dict[str, Any], faults: list[str]) -> None:
    assert ids_with(settings, **changes) == faults
    if faults:
        with pytest.raises(ImproperlyConfigured):
            require_settings(serves_http=True)


def test_a_worker_is_not_asked_about_http(settings: Any) -> None:
    ids_with(settings, ALLOWED_HOSTS=[], BEHIND_TLS_PROXY=False)
    require_settings(serves_http=False)


def test_the_api_does_not_start_without_its_settings() -> None:
    environment = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME"}}
    environment |= {"ACSINFRA_HOME": "/nonexistent", "DATABASE_URL": "postgresql://u:hidden@db.example/x"}
    ran = subprocess.run(
        [sys.executable, "-c", "import acsinfra.asgi"],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    for name in ("SECRET_KEY", "DATABASE_URL", "BROKER_URL", "STORAGE_URL", "ALLOWED_HOSTS", "HTTPS"):
        assert name in ran.stderr
    assert "hidden" not in ran.stderr
