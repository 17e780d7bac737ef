from collections.abc import Iterator
from typing import Any

import pytest

from tests.live_server import LiveServer, serve


@pytest.fixture(scope="session")
def server(django_db_setup: None) -> Iterator[LiveServer]:
    """Return the API in this process; it stops before the database is dropped."""
    with serve() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick_passwords(settings: Any) -> None:
    """Hash passwords quickly: the slow hash is Django's to test."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
