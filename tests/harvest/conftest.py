"""What tests of Harvest jobs share."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
import zstandard
from django.utils import timezone
from pytest_django import Settings
from redis import Redis

from accounts.models import ApiKey, User
from accounts.services import create_key, create_user
from harvest.services import HarvestPlan, runner_queue
from inference import selectors
from inference.models import BaseModel, CheckpointFiles, Engine
from inference.services import register_engine
from tests import live_server
from tests.live_server import LiveServer

type MakePlan = Callable[..., HarvestPlan]


def make_user(name: str, **limits: int | None) -> User:
    """Return a new User with these overrides."""
    user = create_user(username=name, email=f"{name}@example.org")
    User.objects.filter(pk=user.pk).update(**limits)
    user.refresh_from_db()
    return user


def make_key(user: User, name: str = "key") -> ApiKey:
    """Return a new key of the User."""
    return create_key(user=user, name=name)[0]


def make_model(name: str = "tiny", **fields: Any) -> BaseModel:
    """Return a row of a Base model whose checkpoint nobody reads."""
    facts = {
        "source": "/nowhere",
        "served_model_name": name,
        "n_layers": 4,
        "hidden_size": 64,
        "vocab_size": 640,
        "context_length": 512,
        "bos_token_id": 0,
        "activation_dtype": "float32",
    }
    model = BaseModel.objects.create(name=name, **{**facts, **fields})
    CheckpointFiles.objects.create(base_model=model, config={}, tokenizer_zstd=zstandard.compress(b"{}"), sha256="")
    return model


def plan_for(model: BaseModel, **changes: Any) -> HarvestPlan:
    """Return a plan of two short prompts, or with these changes."""
    fields: dict[str, Any] = {
        "base_model_id": model.pk,
        "model": model.name,
        "prompts": ["Hello", "there"],
        "layers": (1, 2, 3),
        "shard_size": 32,
        "batch_size": None,
        "add_special_tokens": True,
        "directions": None,
        "reserved_tokens": 12,
        "bytes_at_most": 10_000,
    }
    return HarvestPlan(**{**fields, **changes})


@pytest.fixture
def model(db: None) -> BaseModel:
    """Return a Base model's row."""
    return make_model()


@pytest.fixture
def user(db: None) -> User:
    """Return a User who may have many unfinished jobs."""
    return make_user("ada", harvests_unfinished=100)


@pytest.fixture
def key(user: User) -> ApiKey:
    """Return a key of `user`."""
    return make_key(user)


@pytest.fixture
def looks(settings: Settings) -> Redis:
    """Return the broker, without any message for the runners of `tiny`."""
    broker: Redis = Redis.from_url(settings.BROKER_URL)
    broker.delete(runner_queue("tiny"))
    return broker


OWNER = uuid.UUID(int=1)
LEASE = timedelta(seconds=30)


def claim(model: BaseModel, owner: uuid.UUID = OWNER) -> Any:
    """Claim the model's next job for `owner`, or return None."""
    from acsinfra.core.leases import claim_next
    from harvest.models import HarvestJob

    job_id = claim_next(HarvestJob, base_model_id=model.pk, owner=owner, lease=LEASE)
    return None if job_id is None else HarvestJob.objects.get(pk=job_id)


def let_the_lease_run_out(job_id: uuid.UUID) -> None:
    """Put the end of a job's lease into the past, as a dead runner would leave it."""
    from harvest.models import HarvestJob

    HarvestJob.objects.filter(pk=job_id).update(lease_expires_at=timezone.now() - timedelta(seconds=1))


# The API over HTTP


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[LiveServer]:
    with live_server.serve() as server:
        yield server


@pytest.fixture
def tiny(transactional_db: None) -> BaseModel:
    """Return a model whose runner is there."""
    model = make_model()
    selectors._catalogue._fresh_until = 0.0
    register_engine(model=model, kind=Engine.Kind.RUNNER)
    return model


@pytest.fixture
def key_and_text(transactional_db: None) -> tuple[ApiKey, str]:
    return live_server.make_key(live_server.make_user(harvests_unfinished=100))


@pytest.fixture
def client(server: LiveServer, tiny: BaseModel, key_and_text: tuple[ApiKey, str]) -> Iterator[httpx.Client]:
    with server.client(key_and_text[1]) as client:
        yield client


def submit(client: httpx.Client, **fields: Any) -> httpx.Response:
    """Submit a job of one short prompt."""
    return client.post("/v1/harvest", json={"model": "tiny", "prompts": ["Hello"], **fields})


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Return the status, code and param of an answer that is an error."""
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "code", "param"}
    return answer.status_code, body["code"], body["param"]


def held(client: httpx.Client) -> int:
    """Return the tokens that the User of `client` holds."""
    return int(client.get("/v1/budget").json()["held"])
