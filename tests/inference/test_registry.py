"""Base models and the registry of engines, over PostgreSQL: services, the catalogue, commands and the admin."""

import asyncio
import io
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import IntegrityError, connection
from django.db.models.functions import Now
from django.test import Client

from accounts.models import User
from acsinfra.core.db import close_async_pool, database_step
from acsinfra.core.errors import ApiError
from budgets.models import GpuTime
from inference import selectors, services
from inference.checkpoints import CheckpointError
from inference.models import BaseModel, CheckpointFiles, Engine
from inference.selectors import Catalogue, CatalogueModel, catalogue, require_inference

pytestmark = pytest.mark.django_db(transaction=True)


def _add(tiny_model: Path, **fields: Any) -> BaseModel:
    return services.add_model(**{"name": "tiny", "source": str(tiny_model), **fields})


def _run(command: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command(command, *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


# Adding and changing models


def test_a_model_takes_its_facts_from_its_checkpoint(tiny_model: Path) -> None:
    model = _add(tiny_model)
    model.refresh_from_db()
    assert (model.n_layers, model.hidden_size, model.context_length, model.bos_token_id) == (4, 64, 512, 0)
    assert (model.activation_dtype, model.dtype, model.served_model_name) == ("float32", "auto", tiny_model.name)
    files = CheckpointFiles.objects.get(base_model=model)
    assert files.config["hidden_size"] == 64
    options = services.engine_options(model=model, checkpoint=model.source)
    assert (options.dtype, options.max_model_len, options.tensor_parallel_size) == ("float32", 512, 1)


def test_a_chosen_dtype_is_that_of_the_activations(tiny_model: Path) -> None:
    assert _add(tiny_model, dtype="bfloat16").activation_dtype == "bfloat16"


def test_a_checkpoint_in_a_dtype_without_activations_needs_a_chosen_one(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "fp8"))
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float8_e4m3fn"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="choose bfloat16"):
        _add(folder)
    assert _add(folder, dtype="float16").activation_dtype == "float16"


def test_the_same_name_is_not_added_twice(tiny_model: Path) -> None:
    _add(tiny_model)
    with pytest.raises(ValidationError, match="already exists"):
        _add(tiny_model)
    assert BaseModel.objects.count() == 1


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "tiny\n"}, "name"),
        ({"name": "-x"}, "name"),
        ({"name": "a" * 101}, "name"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "int8"}, "dtype"),
        ({"extra_args": {"trust_remote_code": True}}, "extra_args"),
        ({"extra_args": []}, "extra_args"),
    ],
)
def test_a_wrong_field_adds_nothing(tiny_model: Path, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _add(tiny_model, **fields)
    assert fault in caught.value.message_dict
    assert not BaseModel.objects.exists()


def test_only_fields_of_the_operator_can_be_set(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match="n_layers"):
        _add(tiny_model, n_layers=99)


def test_the_database_holds_what_a_model_may_be(tiny_model: Path) -> None:
    model = _add(tiny_model)
    for change in ({"name": "a/b"}, {"max_model_len": 513}, {"max_num_seqs": 0}, {"n_layers": 0}, {"name": "tiny\n"}):
        with pytest.raises(IntegrityError):
            BaseModel.objects.filter(pk=model.pk).update(**change)


def test_a_model_changes_and_reads_its_checkpoint_again(tiny_model: Path, tmp_path: Path) -> None:
    model = _add(tiny_model)
    services.update_model(model=model, max_model_len=256, has_harvest=False)
    assert BaseModel.objects.get().effective_max_model_len == 256
    folder = Path(shutil.copytree(tiny_model, tmp_path / "longer"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    services.update_model(model=model, source=str(folder), max_model_len=None)
    changed = BaseModel.objects.get()
    assert (changed.context_length, changed.effective_max_model_len, changed.has_harvest) == (1024, 1024, False)
    with pytest.raises(CheckpointError):
        services.update_model(model=model, source="/nowhere")
    assert BaseModel.objects.get().source == str(folder)


# Commands


def test_addmodel_reads_a_folder(tiny_model: Path) -> None:
    arguments = ["--max-model-len", "128", "--kv-cache-gib", "0.5", "--no-harvest", "--max-num-seqs", "8"]
    arguments += ["--arg", "enforce_eager=true", "--arg", "block_size=32", "--served-model-name", "acs/tiny"]
    printed = _run("addmodel", "tiny-1.5", "--source", str(tiny_model), *arguments)
    assert "4 layers, hidden size 64, context 128 tokens, float32" in printed
    model = BaseModel.objects.get(name="tiny-1.5")
    assert (model.kv_cache_bytes, model.has_harvest, model.max_num_seqs) == (2**29, False, 8)
    assert model.extra_args == {"enforce_eager": True, "block_size": 32}
    assert model.served_model_name == "acs/tiny"
    _run("addmodel", "tiny-1.5", "--update", "--max-model-len", "64", "--harvest")
    model.refresh_from_db()
    assert (model.max_model_len, model.has_harvest, model.max_num_seqs) == (64, True, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "--source is required"),
        (["tiny", "--source", "/no/such/folder"], "no folder here"),
        (["tiny", "--source", "{tiny}", "--max-model-len", "4096"], "may only lower"),
        (["tiny", "--source", "{tiny}", "--arg", "trust_remote_code=true"], "own code is never run"),
        (["tiny", "--source", "{tiny}", "--arg", "enforce_eager"], "not key=value"),
        (["tiny", "--source", "{tiny}", "--kv-cache-gib", "-1"], "must be over 0"),
        (["tiny", "--source", "{tiny}", "--kv-cache-gib", "nan"], "must be over 0"),
        (["tiny", "--source", "{tiny}", "--usd-per-gpu-hour", "two"], "no amount of USD"),
        (["tiny", "--source", "{tiny}", "--usd-per-gpu-hour", "nan"], "finite amount"),
        (["a/b", "--source", "{tiny}"], "name: Letters"),
        (["tiny", "--update"], "There is no model tiny"),
    ],
)
def test_addmodel_says_in_a_sentence_what_is_wrong(tiny_model: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        _run("addmodel", *(argument.format(tiny=tiny_model) for argument in arguments))
    assert not BaseModel.objects.exists()


def test_models_are_listed_and_switched(tiny_model: Path) -> None:
    model = _add(tiny_model)
    services.register_engine(model=model, kind=Engine.Kind.RUNNER)
    assert _run("disablemodel", "tiny") == "tiny is off.\n"
    (line,) = _run("listmodels").splitlines()
    assert line.split("\t")[:3] == ["tiny", "off", "harvest"]
    assert line.endswith("0 inference, 1 runners")
    assert _run("enablemodel", "tiny") == "tiny is on.\n"
    for command in ("enablemodel", "disablemodel"):
        with pytest.raises(CommandError, match="no model nobody"):
            _run(command, "nobody")


# The catalogue and the engines


@pytest_asyncio.fixture
async def fresh_pool() -> AsyncIterator[None]:
    selectors._catalogue = selectors._CachedCatalogue()
    yield
    selectors._catalogue = selectors._CachedCatalogue()
    await close_async_pool()


async def _until(is_so: Callable[[Catalogue], bool], *, seconds: float = 30.0) -> None:
    """Poll the catalogue as requests do; what they see is never to be kept for more than a second."""
    began = time.monotonic()
    while not is_so(await catalogue()):
        assert selectors._catalogue._fresh_until - time.monotonic() <= 1
        assert time.monotonic() - began < seconds, "the catalogue did not change"
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("fresh_pool")
async def test_the_catalogue_follows_the_models_within_a_second_or_so(tiny_model: Path) -> None:
    assert (await catalogue()).models == {}
    with pytest.raises(ApiError) as caught:
        (await catalogue()).get("tiny")
    assert (caught.value.code, caught.value.status, caught.value.param) == ("model_not_found", 400, "model")
    model = await database_step(_add, tiny_model)
    await _until(lambda now: "tiny" in now.models)
    await database_step(services.set_enabled, model=model, enabled=False)
    await _until(lambda now: "tiny" not in now.models)
    await database_step(services.set_enabled, model=model, enabled=True)
    await database_step(services.update_model, model=model, max_model_len=99)
    await _until(lambda now: "tiny" in now.models and now.models["tiny"].max_model_len == 99)
    await database_step(services.remove_model, model=model)
    await _until(lambda now: "tiny" not in now.models)


@pytest.mark.usefixtures("fresh_pool")
async def test_waiting_callers_share_one_read(tiny_model: Path) -> None:
    await database_step(_add, tiny_model)
    many = await asyncio.gather(*(catalogue() for _ in range(200)))
    assert len({id(one) for one in many}) == 1
    cancelled = asyncio.create_task(catalogue())
    selectors._catalogue._fresh_until = 0.0
    others = [asyncio.create_task(catalogue()) for _ in range(3)]
    await asyncio.sleep(0)
    cancelled.cancel()
    assert len({id(one) for one in await asyncio.gather(*others)}) == 1


@pytest.mark.usefixtures("fresh_pool")
async def test_the_tokenizer_comes_out_of_the_database_once(tiny_model: Path) -> None:
    await database_step(_add, tiny_model)
    selectors._tokenizers.keep_only(set())
    entry = (await catalogue()).get("tiny")
    one, other = await asyncio.gather(entry.tokenizer(), entry.tokenizer())
    assert one is other
    (ids,) = await one.encode(["The sky"], add_special_tokens=True, limit=512)
    assert ids[0] == entry.bos_token_id


async def _entry() -> CatalogueModel:
    selectors._catalogue._fresh_until = 0.0
    return (await catalogue()).get("tiny")


@pytest.mark.usefixtures("fresh_pool")
async def test_an_engine_starts_serves_and_leaves(tiny_model: Path) -> None:
    model = await database_step(_add, tiny_model)
    entry = await _entry()
    assert entry.inference_status == "unavailable"
    with pytest.raises(ApiError) as caught:
        require_inference(entry)
    assert (caught.value.code, caught.value.status, caught.value.headers) == ("model_unavailable", 503, {})

    engine = await database_step(services.register_engine, model=model, kind=Engine.Kind.INFERENCE)
    await database_step(services.register_engine, model=model, kind=Engine.Kind.RUNNER)
    entry = await _entry()
    assert entry.inference_status == "starting"
    with pytest.raises(ApiError) as caught:
        require_inference(entry)
    assert (caught.value.code, caught.value.status) == ("model_starting", 503)
    assert 30 <= int(caught.value.headers["Retry-After"]) <= 60

    await database_step(services.mark_live, engine=engine)
    entry = await _entry()
    assert entry.inference_status == "live"
    require_inference(entry)
    assert 0 < entry.load_seconds < 60

    await database_step(BaseModel.objects.update, load_seconds=0.01)
    await database_step(services.mark_starting, engine=engine)
    entry = await _entry()
    assert entry.inference_status == "starting"
    # Its last load took ten milliseconds: the estimate is a second, never less.
    assert entry.seconds_until_live == 1
    await database_step(services.leave_engine, engine=engine)
    assert (await _entry()).inference_status == "unavailable"


@pytest.mark.usefixtures("fresh_pool")
async def test_a_silent_engine_vanishes_and_comes_back_when_it_speaks(tiny_model: Path, settings: Any) -> None:
    settings.ENGINE_SILENT_AFTER = timedelta(seconds=60)
    model = await database_step(_add, tiny_model)
    engine = await database_step(services.register_engine, model=model, kind=Engine.Kind.INFERENCE)
    await database_step(services.mark_live, engine=engine)

    async def be_silent_for(seconds: float) -> None:
        await database_step(Engine.objects.update, heartbeat_at=Now() - timedelta(seconds=seconds))

    for _ in range(2):
        await be_silent_for(40)
        assert await database_step(services.sweep_silent_engines) == 0
        assert await database_step(services.heartbeat, engine=engine)
    assert (await _entry()).inference_status == "live"
    await be_silent_for(61)
    # Before any sweep: a row that is silent counts as gone.
    assert (await _entry()).inference_status == "unavailable"
    assert await database_step(services.sweep_silent_engines) == 1
    assert not await database_step(Engine.objects.exists)

    assert await database_step(services.heartbeat, engine=engine)
    assert (await _entry()).inference_status == "live"
    again = await database_step(Engine.objects.get)
    assert (again.pk, again.started_at, again.live_at) == (engine.pk, engine.started_at, engine.live_at)


def test_an_engine_whose_model_was_removed_is_told_so(tiny_model: Path) -> None:
    model = _add(tiny_model)
    engine = services.register_engine(model=model, kind=Engine.Kind.RUNNER)
    assert services.heartbeat(engine=engine)
    services.remove_model(model=model)
    assert not services.heartbeat(engine=engine)
    assert not Engine.objects.exists()


def test_an_engine_records_its_gpu_time_with_each_heartbeat(tiny_model: Path) -> None:
    model = _add(tiny_model)
    services.update_model(model=model, gpus=4, usd_per_gpu_hour=1)
    engine = services.register_engine(model=model, kind=Engine.Kind.RUNNER)
    GpuTime.objects.update(since=Now() - timedelta(seconds=10), until=Now() - timedelta(seconds=10))
    # What the engine loaded stays; what it costs follows.
    services.update_model(model=model, gpus=None, usd_per_gpu_hour=Decimal("2.5"))
    assert services.heartbeat(engine=engine)
    row = GpuTime.objects.order_by("day").last()
    assert row is not None
    assert (row.engine_id, row.model, row.kind, row.gpus) == (engine.pk, "tiny", "runner", 4)
    assert row.usd_per_gpu_hour == Decimal("2.5")
    seconds = sum(row.gpu_seconds for row in GpuTime.objects.all())
    assert 40 <= seconds < 60
    services.leave_engine(engine=engine)
    assert sum(row.gpu_seconds for row in GpuTime.objects.all()) > seconds


def test_an_engine_costs_its_tensor_parallel_size_unless_told_otherwise(tiny_model: Path) -> None:
    model = _add(tiny_model)
    assert model.gpu_count == 1
    services.update_model(model=model, tensor_parallel_size=2)
    assert model.gpu_count == 2
    services.update_model(model=model, gpus=8)
    assert services.register_engine(model=model, kind=Engine.Kind.RUNNER).gpus == 8


def test_a_live_engine_has_the_time_since_when(tiny_model: Path) -> None:
    engine = services.register_engine(model=_add(tiny_model), kind=Engine.Kind.RUNNER)
    with pytest.raises(IntegrityError):
        Engine.objects.filter(pk=engine.pk).update(status="live", live_at=None)
    connection.rollback()


# The admin


@pytest.fixture
def operator() -> Client:
    user = User.objects.create_superuser(username="operator", email="operator@example.org", password=None)
    client = Client()
    client.force_login(user)
    return client


FORM = {"revision": "", "served_model_name": "", "is_enabled": "on", "has_harvest": "on", "dtype": "auto"} | {
    "max_model_len": "",
    "tensor_parallel_size": "1",
    "kv_cache_bytes": "",
    "max_num_seqs": "16",
    "extra_args": "{}",
    "usd_per_gpu_hour": "1.5",
}


def test_the_admin_adds_changes_and_switches_a_model(operator: Client, tiny_model: Path) -> None:
    add = "/admin/inference/basemodel/add/"
    assert operator.get(add).status_code == 200
    assert operator.post(add, {**FORM, "name": "tiny", "source": str(tiny_model)}).status_code == 302
    model = BaseModel.objects.get(name="tiny")
    assert (model.n_layers, model.max_num_seqs, model.served_model_name) == (4, 16, tiny_model.name)
    assert CheckpointFiles.objects.filter(base_model=model).exists()

    change = f"/admin/inference/basemodel/{model.pk}/change/"
    form = {**FORM, "source": model.source, "served_model_name": "acs/tiny", "max_model_len": "64", "name": "other"}
    assert operator.post(change, form).status_code == 302
    model.refresh_from_db()
    assert (model.name, model.served_model_name, model.max_model_len) == ("tiny", "acs/tiny", 64)

    action = {"action": "disable", "_selected_action": [str(model.pk)], "confirmed": "yes"}
    assert operator.post("/admin/inference/basemodel/", action).status_code == 302
    assert not BaseModel.objects.get().is_enabled
    services.register_engine(model=model, kind=Engine.Kind.RUNNER)
    assert "runner" in operator.get("/admin/inference/engine/").content.decode()
    delete = f"/admin/inference/basemodel/{model.pk}/delete/"
    assert "Engines: 1; stop them first" in operator.get(delete).content.decode()
    operator.post(delete, {"post": "yes"})
    Engine.objects.all().delete()
    operator.post(delete, {"post": "yes"})
    assert not BaseModel.objects.exists()
    assert operator.get("/admin/inference/engine/add/").status_code == 403


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "/no/such/folder"}, "no folder here"),
        ({"max_model_len": "9999"}, "may only lower"),
        ({"extra_args": '{"worker_cls": "a.B"}'}, "loads code"),
        ({"extra_args": "[]"}, "must be an object"),
        ({"name": "a/b"}, "Letters, digits"),
        ({"max_num_seqs": "0"}, "greater than or equal to 1"),
    ],
)
def test_the_admin_says_what_is_wrong(operator: Client, tiny_model: Path, change: dict[str, str], message: str) -> None:
    form = {**FORM, "name": "tiny", "source": str(tiny_model), **change}
    answer = operator.post("/admin/inference/basemodel/add/", form)
    assert answer.status_code == 200
    assert message in answer.content.decode()
    assert not BaseModel.objects.exists()
