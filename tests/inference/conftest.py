"""What tests of Base models, of the validation of Completions and of the bus share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from acsinfra.core.db import close_async_pool
from acsinfra.core.errors import ApiError
from inference import selectors
from inference.completions import prepare_completion
from inference.selectors import Catalogue, CatalogueModel
from inference.services import add_model, remove_model
from inference.wire import CompletionWork
from tests.inference.broker import Broker


class Preparer:
    """Puts bodies through `prepare_completion` against the tiny model; a body here names `model` and `prompt`."""

    def __init__(self, catalogue: Catalogue, runner: asyncio.Runner) -> None:
        self.catalogue = catalogue
        self.runner = runner
        self.model: CatalogueModel = catalogue.get("tiny")

    def __call__(self, **fields: Any) -> CompletionWork:
        """Return the work of a body with these fields; None leaves nothing out, it is sent as null."""
        return self.body({"model": "tiny", "prompt": "The sky is", **fields})

    def body(self, body: Any) -> CompletionWork:
        """Return the work of exactly this body."""
        return self.runner.run(
            prepare_completion(body, catalogue=self.catalogue, request_id="req_test", is_large=False)
        )

    def refused(self, **fields: Any) -> ApiError:
        """Return the refusal of a body with these fields."""
        with pytest.raises(ApiError) as caught:
            self(**fields)
        return caught.value

    def of(self, **facts: Any) -> "Preparer":
        """Return the same for a model with other facts."""
        model = msgspec.structs.replace(self.model, **facts)
        return Preparer(Catalogue({"tiny": model}), self.runner)


@pytest.fixture(scope="module")
def prepare(tiny_model: Path, django_db_setup: None, django_db_blocker: Any) -> Iterator[Preparer]:
    """Return the way from a body to its work, over a row of the tiny model (4 layers, hidden 64, context 512).

    Its users carry the mark `django_db`, without which pytest-django makes no test database.
    """
    with asyncio.Runner() as runner, django_db_blocker.unblock():
        model = add_model(name="tiny", source=str(tiny_model), dtype="float32")
        selectors._catalogue = selectors._CachedCatalogue()
        try:
            yield Preparer(runner.run(selectors.catalogue()), runner)
        finally:
            remove_model(model=model)
            selectors._catalogue = selectors._CachedCatalogue()
            runner.run(close_async_pool())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Return a Valkey of the module's own, which its tests may kill."""
    broker = Broker(tmp_path_factory.mktemp("valkey"))
    broker.start()
    yield broker
    broker.kill()
