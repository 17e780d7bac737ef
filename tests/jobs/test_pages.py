"""The pages of Jobs, of both kinds: one list, cheap at any size, and nobody else's."""

import base64
import json
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zstandard
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.html import escape
from safetensors.numpy import save

from accounts.models import ApiKey, User
from acsinfra.core.ids import new_uuid7
from acsinfra.core.storage import get_storage
from harvest.models import HarvestJob, HarvestShard
from harvest.services import submit_harvest
from inference.models import BaseModel
from inference.wire import Sampling, SteeringVector
from jobs import running
from jobs.listing import JobFilter, list_lines
from jobs.models import CompletionJob, JobRequest, JobResult
from jobs.recipes import body_of, shell_recipe
from jobs.result_views import heat_token, shade_of
from jobs.services import Answer
from tests.harvest.conftest import make_key, make_user, plan_for
from tests.jobs.conftest import OWNER, claimed, submit, work_for

pytestmark = pytest.mark.django_db

TEXT = '<script>alert("x")</script> & more'
QUERIES_AT_MOST = 10


@pytest.fixture
def signed_in(client: Client, user: User) -> Client:
    client.force_login(user)
    return client


def finish(job: CompletionJob, body: dict[str, Any], status: int = 200) -> CompletionJob:
    raw = json.dumps(body).encode()
    answer = Answer(status=status, body=raw, bytes=len(raw))
    return running.finish_job(job_id=job.pk, owner=OWNER, tokens=7, answer=answer)


def completion(**more: Any) -> dict[str, Any]:
    logprobs = {
        "tokens": ["<b>", "\n"],
        "token_logprobs": [None, -2.5],
        "top_logprobs": [None, {"\n": -2.5, " the": -0.4}],
        "text_offset": [0, 3],
    }
    choice = {"index": 0, "text": TEXT, "finish_reason": "length", "logprobs": logprobs, "stop_reason": None}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}, **more}


def done_harvest(user: User, key: ApiKey, model: BaseModel, n_shards: int = 3) -> HarvestJob:
    """Make a done job with its statistics in storage."""
    job = submit_harvest(user=user, api_key=key, plan=plan_for(model))
    stats = save({"mean_token_norm": np.array([1.5, 2.5], np.float32), "count": np.array([40])})
    get_storage().write(f"{job.storage_prefix}/stats.safetensors", stats)
    for index in range(n_shards):
        shard = f"{job.storage_prefix}/shard_{index:05d}.safetensors"
        HarvestShard.objects.create(job=job, index=index, key=shard, bytes=2048, sha256="0" * 64, sums_key="s")
    result = {
        "manifest_key": f"{job.storage_prefix}/manifest.json",
        "manifest_bytes": 700,
        "stats_key": f"{job.storage_prefix}/stats.safetensors",
        "tokens": 41,
        "bytes_written": 6144,
        "timings": {"load_s": 0.5},
    }
    now = timezone.now()
    HarvestJob.objects.filter(pk=job.pk).update(
        status="done",
        started_at=now,
        completed_at=now,
        tokens=job.reserved_tokens,
        result=result,
        layers=[1, 3],
        bytes_written=6144,
    )
    job.refresh_from_db()
    return job


# The list


def test_both_kinds_are_one_list_newest_first_a_page_at_a_time(user: User, key: ApiKey, model: BaseModel) -> None:
    made = []
    for at in range(9):
        made.append(
            submit_harvest(user=user, api_key=make_key(user, f"h{at}"), plan=plan_for(model)).pk
            if at % 3 == 2
            else submit(user, key, model).pk
        )
    submit(make_user("bob"), None, model)
    found: list[uuid.UUID] = []
    after = None
    while True:
        page = list_lines(user=user, only=JobFilter(), after=after, limit=2)
        found += [line.id for line in page.lines]
        if not page.has_more:
            break
        after = found[-1]
    assert found == made[::-1]
    assert len(list_lines(user=user, only=JobFilter(kind="harvest")).lines) == 3
    assert len(list_lines(user=user, only=JobFilter(kind="completion", key_id=key.pk)).lines) == 6
    assert list_lines(user=user, only=JobFilter(model="other")).lines == []
    assert list_lines(user=user, only=JobFilter(status="running")).is_live is False
    claimed(model)
    assert len(list_lines(user=user, only=JobFilter(status="running")).lines) == 1
    assert len(list_lines(user=user, only=JobFilter(status="waiting")).lines) == 8


def test_the_list_is_polled_only_while_something_may_change(signed_in: Client, user: User, model: BaseModel) -> None:
    job = submit(user, None, model)
    assert 'hx-trigger="every 2s"' in signed_in.get("/app/jobs").content.decode()
    claimed(model)
    finish(job, completion())
    part = signed_in.get("/app/jobs", headers={"HX-Request": "true"}).content.decode()
    assert "hx-trigger" not in part
    assert "<html" not in part
    assert "succeeded" in part


@pytest.mark.parametrize(
    "query", ["kind=x&status=x&model=x&key=x", "key=" + "9" * 40, "key=-1", "model=" + "x" * 3000, "key=٣"]
)
def test_a_filter_that_means_nothing_is_left_out(signed_in: Client, query: str) -> None:
    assert signed_in.get(f"/app/jobs?{query}").status_code == 200


def test_an_id_to_go_on_from_must_be_one(signed_in: Client) -> None:
    assert signed_in.get("/app/jobs?after=x").status_code == 404
    assert signed_in.get(f"/app/jobs?after={uuid.uuid4()}").status_code == 200


def test_ten_thousand_jobs_cost_what_ten_do(signed_in: Client, user: User, key: ApiKey, model: BaseModel) -> None:
    now = timezone.now()
    jobs = [
        CompletionJob(
            pk=new_uuid7(),
            user=user,
            api_key=key,
            base_model=model,
            model=model.name,
            status="cancelled",
            hold_tokens=9,
            charged_tokens=0,
            finished_at=now,
            expires_at=now + timedelta(days=30),
            cancel_requested_at=now,
        )
        for _ in range(10_000)
    ]
    CompletionJob.objects.bulk_create(jobs, batch_size=2_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE jobs_completionjob")
    signed_in.get("/app/jobs")
    for path in ("/app/jobs", f"/app/jobs?after={jobs[100].pk}", "/app/jobs?status=failed&model=none", "/app"):
        with CaptureQueriesContext(connection) as queries:
            began = time.perf_counter()
            assert signed_in.get(path).status_code == 200
            milliseconds = (time.perf_counter() - began) * 1000
        sys.stdout.write(f"{path}: {milliseconds:.0f} ms, {len(queries)} queries\n")
        assert len(queries) <= QUERIES_AT_MOST, [query["sql"] for query in queries]


# A Completion Job


def test_a_job_s_page_shows_request_times_and_result(signed_in: Client, user: User, model: BaseModel) -> None:
    sampling = Sampling(max_tokens=10, temperature=0.5, logprobs=2, stop=("\n", "it's"), ignore_eos=True)
    job = submit(user, None, model, sampling=sampling, prompt_texts=("It's <here>",))
    waiting = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert "It&#x27;s &lt;here&gt;" in waiting
    assert 'hx-trigger="every 1s"' in waiting
    # What it asks for is written as it was sent.
    assert escape('["\\n", "it\'s"]') in waiting
    assert "<dd>true</dd>" in waiting
    assert "waits for" in waiting
    claimed(model)
    assert "running" in signed_in.get(f"/app/jobs/{job.pk}", headers={"HX-Request": "true"}).content.decode()
    finish(job, completion())
    ended = signed_in.get(f"/app/jobs/{job.pk}", headers={"HX-Request": "true"})
    assert ended.headers["HX-Refresh"] == "true"
    with CaptureQueriesContext(connection) as queries:
        page = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert len(queries) <= QUERIES_AT_MOST
    assert "hx-trigger" not in page
    assert TEXT not in page
    assert "&lt;script&gt;" in page
    assert 'class="h3"' in page  # -2.5: 3.6 bits
    assert "Run this from a shell script" in page
    assert "temperature" in page


def test_activations_are_summed_up_by_layer(signed_in: Client, user: User, model: BaseModel) -> None:
    values = np.stack([np.full((5, 16), 1.0), np.full((5, 16), 3.0)]).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    tensor = {
        "data": base64.b64encode(zstandard.compress(bits.tobytes())).decode(),
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
        "shape": [2, 5, 16],
        "compression": "zstd",
    }
    job = submit(user, None, model, capture_layers=(1, 3))
    claimed(model)
    finish(job, completion(activations={"residual_stream": tensor}))
    page = signed_in.get(f"/app/jobs/{job.pk}")
    shown = page.context["result"].activations
    assert (shown.shape, shown.dtype, shown.layers) == ((2, 5, 16), "bfloat16", (1, 3))
    assert shown.norms == pytest.approx((4.0, 12.0))
    assert "layer 3: 12" in page.content.decode()


def test_a_large_result_comes_after_its_page(signed_in: Client, user: User, model: BaseModel) -> None:
    job = submit(user, None, model)
    claimed(model)
    finish(job, completion(padding="x" * 300_000))
    page = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert f'hx-get="/app/jobs/{job.pk}/result"' in page
    assert "&lt;script&gt;" in signed_in.get(f"/app/jobs/{job.pk}/result").content.decode()
    part = signed_in.get(f"/app/jobs/{job.pk}/result", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in part
    JobResult.objects.update(body=None, key="jobs/gone/result.json", bytes=10)
    assert "was lost" in signed_in.get(f"/app/jobs/{job.pk}/result").content.decode()
    JobResult.objects.update(bytes=10**12)
    assert "too much for a page" in signed_in.get(f"/app/jobs/{job.pk}/result").content.decode()


def test_a_failed_job_says_why(signed_in: Client, user: User, model: BaseModel) -> None:
    job = submit(user, None, model)
    claimed(model)
    finish(job, {"error": {"message": "It took <too> long.", "code": "engine_timeout"}}, status=504)
    page = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert "engine_timeout" in page
    assert "It took &lt;too&gt; long." in page


def test_an_ended_job_is_erased_and_stays_in_the_list(signed_in: Client, user: User, model: BaseModel) -> None:
    job = submit(user, None, model)
    erase = f"/app/jobs/{job.pk}/delete"
    signed_in.post(erase)
    assert JobRequest.objects.filter(job=job).exists()
    claimed(model)
    finish(job, completion())
    assert "Erase the request and the result?" in signed_in.get(erase).content.decode()
    assert JobResult.objects.filter(job=job).exists()
    for _ in range(2):
        assert signed_in.post(erase).headers["location"] == f"/app/jobs/{job.pk}"
    assert not JobResult.objects.filter(job=job).exists()
    assert not JobRequest.objects.filter(job=job).exists()
    page = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert "has expired or was erased" in page
    assert signed_in.get(f"/app/jobs/{job.pk}/result").status_code == 404
    assert str(job.pk) in signed_in.get("/app/jobs").content.decode()


# A Harvest job


def test_a_harvest_s_page_has_links_sizes_and_a_snippet(
    signed_in: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    job = done_harvest(user, key, model, n_shards=23)
    with CaptureQueriesContext(connection) as queries:
        page = signed_in.get(f"/app/jobs/harvest/{job.pk}").content.decode()
    assert len(queries) <= QUERIES_AT_MOST
    assert "shard_00019.safetensors" in page
    assert "shard_00020.safetensors" not in page
    assert "700 B" in page
    assert "2 KiB" in page
    assert "from safetensors.torch import load" in page
    more = signed_in.get(f"/app/jobs/harvest/{job.pk}?first_shard=20").content.decode()
    assert "shard_00022.safetensors" in more
    norms = signed_in.get(f"/app/jobs/harvest/{job.pk}/statistics", headers={"HX-Request": "true"})
    assert norms.context["statistics"].rows == [(1, 1.5), (3, 2.5)]
    get_storage().delete_prefix(job.storage_prefix)
    gone = signed_in.get(f"/app/jobs/harvest/{job.pk}/statistics")
    assert "cannot be read" in gone.content.decode()


def test_a_harvest_is_cancelled_and_its_files_are_deleted(
    signed_in: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    job = submit_harvest(user=user, api_key=key, plan=plan_for(model))
    url = f"/app/jobs/harvest/{job.pk}"
    assert "Nothing is charged" in signed_in.get(f"{url}/cancel").content.decode()
    signed_in.post(f"{url}/delete")
    job.refresh_from_db()
    assert (job.status, job.files_deleted_at) == ("pending", None)
    signed_in.post(f"{url}/cancel")
    job.refresh_from_db()
    assert job.status == "cancelled"
    assert "keeps no files" in signed_in.get(url).content.decode()
    assert "Erase the prompts" in signed_in.get(f"{url}/delete").content.decode()
    signed_in.post(f"{url}/delete")
    job.refresh_from_db()
    assert job.files_deleted_at is not None
    assert "Its prompts were erased" in signed_in.get(url).content.decode()
    done = done_harvest(user, key, model)
    assert "6 KiB of files" in signed_in.get(f"/app/jobs/harvest/{done.pk}/delete").content.decode()
    signed_in.post(f"/app/jobs/harvest/{done.pk}/delete")
    assert "They were deleted" in signed_in.get(f"/app/jobs/harvest/{done.pk}").content.decode()


# Others


def test_another_s_jobs_are_not_there(client: Client, user: User, key: ApiKey, model: BaseModel) -> None:
    job = submit(user, key, model, prompt_texts=("a secret",))
    harvest = done_harvest(user, key, model)
    client.force_login(make_user("eve"))
    for path in ("/app/jobs", "/app", f"/app/jobs?key={key.pk}"):
        page = client.get(path).content.decode()
        assert str(job.pk) not in page
        assert str(harvest.pk) not in page
    for path in ("", "/result", "/download", "/delete"):
        assert client.get(f"/app/jobs/{job.pk}{path}").status_code == 404
    for path in ("", "/statistics", "/cancel", "/delete"):
        assert client.get(f"/app/jobs/harvest/{harvest.pk}{path}").status_code == 404
    for path in (f"{job.pk}/delete", f"harvest/{harvest.pk}/delete", f"harvest/{harvest.pk}/cancel"):
        assert client.post(f"/app/jobs/{path}").status_code == 404
    job.refresh_from_db()
    harvest.refresh_from_db()
    assert (job.status, harvest.files_deleted_at) == ("queued", None)


def test_job_pages_are_for_people_who_signed_in(client: Client) -> None:
    some = uuid.uuid4()
    for path in ("", "/jobs", "/jobs/shell", f"/jobs/{some}", f"/jobs/{some}/result", f"/jobs/harvest/{some}"):
        answer = client.get(f"/app{path}")
        assert answer.headers["location"].startswith("/app/sign-in")


# Recipes and heat


def test_the_recipe_says_what_was_asked() -> None:
    model = BaseModel(name="tiny", served_model_name="tiny")
    sampling = Sampling(
        max_tokens=5, temperature=0.0, stop=("\n",), logit_bias={7: -1.5}, logprobs=2, prompt_logprobs=2
    )
    work = work_for(uuid.uuid4(), model, sampling=sampling, echo=True, prompt_texts=("it's",), capture_layers=(0, 2))
    assert body_of(work) == {
        "model": "tiny",
        "prompt": "it's",
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["\n"],
        "logit_bias": {"7": -1.5},
        "logprobs": 2,
        "echo": True,
        "output_residual_stream": [0, 2],
    }
    assert body_of(work_for(uuid.uuid4(), model))["prompt"] == [5, 6, 7]


def test_the_recipe_is_a_script_whatever_the_prompt() -> None:
    recipe = shell_recipe({"prompt": "it's $HOME `x` \\ \n\"é"}, base="https://here.example", job_key="k")
    assert recipe is not None
    assert subprocess.run(["sh", "-n"], input=recipe, text=True, check=False).returncode == 0
    assert shell_recipe({"prompt": "x" * 40_000}, base="", job_key="k") is None


def test_a_steered_job_has_no_recipe(signed_in: Client, user: User, model: BaseModel) -> None:
    vector = SteeringVector(data=b"\0" * 256, dtype="float32", shape=(1, 64), layer_indices=(1,))
    job = submit(user, None, model, steering=(vector,))
    page = signed_in.get(f"/app/jobs/{job.pk}").content.decode()
    assert "Steering vectors" in page
    assert "A steered request holds tensors" in page


def test_heat_grows_with_surprise() -> None:
    shades = [shade_of(logprob) for logprob in (0.0, -0.2, -0.6, -1.2, -2.0, -3.0, -4.0, -5.0, -7.0, -30.0)]
    assert shades == list(range(10))
    assert shade_of(None) is None
    assert heat_token("a", -1.0, {"b": -0.5, "a": -1.0}).alternatives == (("b", -0.5), ("a", -1.0))
