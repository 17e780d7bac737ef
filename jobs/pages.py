"""The pages of Jobs, of both kinds: the list, one of each, the shell recipe, and the first page of the App."""

import functools
import json
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast
from urllib.parse import urlencode

import msgspec
import zstandard
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from accounts.pages import signed_in
from accounts.selectors import keys_of
from acsinfra.core.db import database_step, give_back_connection
from acsinfra.core.errors import ApiError
from acsinfra.core.file_links import base_url
from acsinfra.core.middleware import as_response
from acsinfra.templatetags.shown import size
from budgets.selectors import budget_summary
from harvest import services as harvest_services
from harvest.file_views import files_of, first_prompts, statistics_of
from harvest.models import HarvestCorpus, HarvestJob
from inference.models import BaseModel
from inference.wire import CompletionWork
from jobs import services
from jobs.cancelling import cancel
from jobs.listing import (
    KINDS,
    STATUSES,
    JobFilter,
    Kind,
    completion_line,
    harvest_line,
    list_lines,
)
from jobs.models import CompletionJob, JobRequest, JobResult
from jobs.recipes import body_of, harvest_recipe, shell_recipe
from jobs.result_views import AT_ONCE_BYTES, ShownResult, read_result
from jobs.results import answer_result
from jobs.serializers import is_result_expired
from jobs.timeline import timeline

RECENT: Final = 5
PROMPTS_SHOWN: Final = 5
KEYS_IN_FILTER: Final = 100


# The list


@login_required
@never_cache
@require_safe
def home_page(request: HttpRequest) -> HttpResponse:
    """Where the API is, what is left of the Budget, the latest jobs, and the first steps."""
    user = signed_in(request)
    model = BaseModel.objects.filter(is_enabled=True).values_list("name", flat=True).first()
    base = base_url(request)
    first = [
        'curl "$ACS_API_BASE/completions" \\',
        '  -H "Authorization: Bearer $ACS_API_KEY" -H "Content-Type: application/json" \\',
        f'  -d \'{{"model": "{model}", "prompt": "The capital of France is", "max_tokens": 8}}\'',
    ]
    shown = {
        "api_base": f"{base}/v1",
        "budget": budget_summary(user),
        "has_key": keys_of(user).filter(revoked_at=None).exists(),
        "recent": list_lines(user=user, only=JobFilter(), limit=RECENT),
        "setup": f"export ACS_API_BASE={base}/v1\nexport ACS_API_KEY=…   # one of your keys",
        "first_request": "\n".join(first) if model else "",
    }
    return render(request, "jobs/home.html", shown)


@login_required
@never_cache
@require_safe
def jobs_page(request: HttpRequest) -> HttpResponse:
    """Jobs of both kinds, newest first. htmx asks for the list alone, while something in it may still change."""
    user = signed_in(request)
    only, after = _asked_filter(request), _asked_id(request.GET.get("after"))
    page = list_lines(user=user, only=only, after=after)
    query = only.as_query()
    older = urlencode({**query, "after": str(page.lines[-1].id)}) if page.has_more else ""
    here = urlencode({**query, **({"after": str(after)} if after else {})})
    shown: dict[str, Any] = {"page": page, "older": older, "here": here, "after": after, "newest": urlencode(query)}
    if "HX-Request" in request.headers:
        return render(request, "jobs/list.html", shown)
    models = list(BaseModel.objects.values_list("name", flat=True))
    shown |= {
        "only": only,
        "is_filtered": bool(query),
        "kinds": KINDS.items(),
        "statuses": STATUSES,
        "models": models if only.model in (None, *models) else [*models, only.model],
        "keys": keys_of(user)[:KEYS_IN_FILTER],
    }
    return render(request, "jobs/jobs.html", shown)


@login_required
@require_safe
def shell_page(request: HttpRequest) -> HttpResponse:
    """Run a Job from a shell script: the recipe."""
    model = BaseModel.objects.filter(is_enabled=True).values_list("name", flat=True).first()
    body = {"model": model or "MODEL", "prompt": "The sky is", "max_tokens": 16}
    recipe = shell_recipe(body, base=base_url(request), job_key="sky-001")
    return render(request, "jobs/shell.html", {"recipe": recipe})


def _asked_filter(request: HttpRequest) -> JobFilter:
    """The filter of the query; what it cannot mean counts as left out."""
    query = request.GET
    kind = query.get("kind")
    key = query.get("key", "")
    return JobFilter(
        kind=cast("Kind", kind) if kind in KINDS else None,
        status=query["status"] if query.get("status") in STATUSES else None,
        model=query.get("model", "").replace("\0", "")[:100] or None,
        key_id=int(key) if key.isascii() and key.isdigit() and len(key) < 19 else None,
    )


def _asked_id(text: str | None) -> uuid.UUID | None:
    if not text:
        return None
    try:
        return uuid.UUID(text)
    except ValueError:
        raise Http404("no such job") from None


# A Completion Job


def _job(request: HttpRequest, job_id: uuid.UUID) -> CompletionJob:
    """The User's own Job, or 404."""
    return get_object_or_404(CompletionJob.objects.select_related("api_key"), user=signed_in(request), pk=job_id)


@login_required
@never_cache
@require_safe
def job_page(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """One Completion Job; htmx asks for its state alone until it has ended, and then loads the page anew."""
    job = _job(request, job_id)
    line = completion_line(job)
    shown: dict[str, Any] = {
        "job": job,
        "line": line,
        "timeline": timeline(line),
        "is_expired": is_result_expired(job),
    }
    if "HX-Request" in request.headers:
        return _state(request, "jobs/job_state.html", shown)
    work = _work(job)
    if work is not None:
        shown |= {"asked": _asked(work), "is_steered": bool(work.steering)}
        if not work.steering:
            base = base_url(request)
            shown["recipe"] = shell_recipe(body_of(work), base=base, job_key=f"again-{str(job.pk)[-12:]}")
    result = None if shown["is_expired"] else JobResult.objects.filter(job=job).first()
    if result is not None and result.bytes <= AT_ONCE_BYTES:
        shown["result"] = _read_result(result, work)
    shown["has_result"] = result is not None
    return render(request, "jobs/job.html", shown)


@login_required
@never_cache
@require_safe
def job_result_part(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """The result of a Job alone: a large one comes after its page."""
    job = _job(request, job_id)
    row = None if is_result_expired(job) else JobResult.objects.filter(job=job).first()
    if row is None:
        raise Http404("no result")
    name = "jobs/result.html" if "HX-Request" in request.headers else "jobs/result_page.html"
    return render(request, name, {"job": job, "result": _read_result(row, _work(job))})


def _work(job: CompletionJob) -> CompletionWork | None:
    """What the Job asks for, where that is kept still."""
    row = JobRequest.objects.filter(job=job).first()
    if row is None or is_result_expired(job):
        return None
    return msgspec.json.decode(zstandard.decompress(bytes(row.work_zstd)), type=CompletionWork)


def _asked(work: CompletionWork) -> dict[str, Any]:
    """The request for the page: its first prompts, and what it sets."""
    body = body_of(work)
    prompt = body.pop("prompt")
    prompts = prompt if len(work.prompts) > 1 else [prompt]
    return {
        "prompts": prompts[:PROMPTS_SHOWN],
        "n_prompts": len(prompts),
        "prompts_left_out": max(0, len(prompts) - PROMPTS_SHOWN),
        "prompt_tokens": work.prompt_tokens,
        "settings": [(name, json.dumps(value, ensure_ascii=False)) for name, value in body.items() if name != "model"],
        "n_vectors": len(work.steering),
    }


def _read_result(row: JobResult, work: CompletionWork | None) -> ShownResult:
    return read_result(row, capture_layers=() if work is None else work.capture_layers)


@login_required
@require_http_methods(["GET", "POST"])
def delete_job_result(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """Ask, then erase the request and the result of an ended Job."""
    job = _job(request, job_id)
    if request.method == "POST":
        _do(request, lambda: services.erase_result(job_id=job.pk), "The request and the result were erased.")
        return redirect("job", job.pk)
    question = {
        "title": "Erase the request and the result?",
        "text": "The Job stays in the list; what it asked for and what it answered are gone, for the API too.",
        "action": "Erase",
        "back_url": request.path.removesuffix("/delete"),
    }
    return render(request, "confirm.html", question)


def _async_page[**P](
    page: Callable[P, Coroutine[Any, Any, HttpResponseBase]],
) -> Callable[P, Coroutine[Any, Any, HttpResponseBase]]:
    """An async view of signed-in Users, below a Job's page."""

    @functools.wraps(page)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        request = cast("HttpRequest", args[0])
        user = await request.auser()
        await give_back_connection()
        if not user.is_authenticated:
            return redirect_to_login(reverse("job", kwargs=kwargs))
        request.user = user
        return await page(*args, **kwargs)

    return guarded


@require_http_methods(["GET", "POST"])
@_async_page
async def cancel_job_now(request: HttpRequest, job_id: uuid.UUID) -> HttpResponseBase:
    """Cancel a Completion Job; an ended one stays as it is, and who only looks at the address is shown the Job."""
    job = await database_step(_job, request, job_id)
    if request.method == "POST":
        await cancel(job.pk)
    return redirect("job", job.pk)


@require_safe
@_async_page
async def download_result(request: HttpRequest, job_id: uuid.UUID) -> HttpResponseBase:
    """What `GET /v1/completion-jobs/{job_id}/result` answers, as a file."""
    job = await database_step(_job, request, job_id)
    if not job.is_ended:
        raise Http404("no result yet")
    try:
        response = await answer_result(job)
    except ApiError as error:
        response = as_response(error)
    response["Content-Disposition"] = f'attachment; filename="job-{job.pk}.json"'
    return response


# A Harvest job


def _harvest(request: HttpRequest, job_id: uuid.UUID) -> HarvestJob:
    """The User's own Harvest job, or 404."""
    return get_object_or_404(HarvestJob.objects.select_related("api_key"), user=signed_in(request), pk=job_id)


@login_required
@never_cache
@require_safe
def harvest_page(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """One Harvest job; htmx asks for its state alone until it has ended."""
    job = _harvest(request, job_id)
    line = harvest_line(job)
    shown: dict[str, Any] = {"job": job, "line": line, "timeline": timeline(line)}
    if "HX-Request" in request.headers:
        return _state(request, "jobs/harvest_state.html", shown)
    first_shard = request.GET.get("first_shard", "0")
    first = int(first_shard) if first_shard.isascii() and first_shard.isdigit() and len(first_shard) < 6 else 0
    base = base_url(request)
    corpus = HarvestCorpus.objects.only("prompts_zstd").filter(job=job).first()
    is_projected = job.contents == HarvestJob.Contents.PROJECTIONS
    shown |= {
        "files": files_of(job, base_url=base, first_shard=first),
        "prompts": first_prompts(bytes(corpus.prompts_zstd)) if corpus is not None else [],
        "recipe": harvest_recipe(job_id=str(job.pk), base=base, layers=job.layers, is_projected=is_projected),
        "timings": (job.result or {}).get("timings", {}).items(),
    }
    return render(request, "jobs/harvest.html", shown)


@login_required
@never_cache
@require_safe
def harvest_statistics_part(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """The norms of a done job, read from its statistics in storage."""
    job = _harvest(request, job_id)
    name = "jobs/statistics.html" if "HX-Request" in request.headers else "jobs/statistics_page.html"
    return render(request, name, {"job": job, "statistics": statistics_of(job)})


@login_required
@require_http_methods(["GET", "POST"])
def cancel_harvest(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """Ask, saying what it costs, then cancel."""
    job = _harvest(request, job_id)
    if request.method == "POST":
        _do(request, lambda: harvest_services.cancel_harvest(job_id=job.pk), "")
        return redirect("harvest-job", job.pk)
    cost = f"The {job.reserved_tokens:,} tokens that it reserved are charged, since it has started."
    question = {
        "title": "Cancel this Harvest job?",
        "text": f"{cost if job.started_at else 'Nothing is charged, since it has not started.'} Its files are deleted.",
        "action": "Cancel the job",
        "back_url": request.path.removesuffix("/cancel"),
    }
    return render(request, "confirm.html", question)


@login_required
@require_http_methods(["GET", "POST"])
def delete_harvest_files(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    """Ask, then delete the files and prompts of an ended job; one that is not done has prompts alone."""
    job = _harvest(request, job_id)
    has_files = job.status == HarvestJob.Status.DONE
    if request.method == "POST":
        done = "The files and prompts are being deleted; links to them stop working." if has_files else "It is erased."
        _do(request, lambda: harvest_services.delete_files(job_id=job.pk), done)
        return redirect("harvest-job", job.pk)
    what = f"{size(job.bytes_written)} of files and the prompts" if has_files else "The prompts"
    question = {
        "title": "Delete the files of this Harvest job?" if has_files else "Erase the prompts of this Harvest job?",
        "text": f"{what} are deleted for ever. The job stays.",
        "action": "Delete the files" if has_files else "Erase the prompts",
        "back_url": request.path.removesuffix("/delete"),
    }
    return render(request, "confirm.html", question)


def _state(request: HttpRequest, template: str, shown: dict[str, Any]) -> HttpResponse:
    """The part of a page that changes; the end of the job brings more than that, so the page is loaded anew."""
    if shown["line"].is_ended:
        return HttpResponse(status=200, headers={"HX-Refresh": "true"})
    return render(request, template, shown)


def _do(request: HttpRequest, action: Callable[[], object], done: str) -> None:
    """Do what a page asks for and say so, or say why not."""
    try:
        action()
    except ApiError as error:
        messages.error(request, error.message)
    else:
        if done:
            messages.success(request, done)
