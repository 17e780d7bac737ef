from collections.abc import Iterator

import pytest

from tests.live_server import LiveServer, make_key, serve


@pytest.fixture(scope="session")
def server(django_db_setup: None) -> Iterator[LiveServer]:
    """Return the API in this process; it stops before the database is dropped."""
    with serve() as server:
        yield server


@pytest.fixture
def key(transactional_db: None) -> str:
    """Return the text of a working key."""
    return make_key()[1]
