"""The views of `/v1/harvest`."""

import asyncio
import time
import uuid
from typing import Any, cast

from django.conf import settings
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import ApiKey, User
from accounts.selectors import limit as limit_of
from acsinfra.core.api_view import ApiView, is_large
from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.fields import query_integer
from acsinfra.core.file_links import base_url
from acsinfra.core.idempotency import (
    IdempotentRequest,
    find_work_async,
    idempotent_request,
    read_idempotency_key,
)
from acsinfra.core.listing import read_list_query
from acsinfra.core.threads import in_thread_if
from budgets.spend import require_spending_async
from harvest import selectors, services
from harvest.models import HarvestJob
from harvest.plans import plan_harvest
from harvest.schema import (
    CANCEL_HARVEST,
    CREATE_HARVEST,
    DELETE_HARVEST,
    GET_HARVEST,
    LIST_HARVESTS,
    WAIT_AT_MOST,
)
from harvest.serializers import HarvestRequestSerializer, job_as_json
from harvest.waiting import wait_for_change
from inference.selectors import catalogue

DECLINED = {"X-Acs-Longpoll": "declined", "Retry-After": "3"}
RUNNER_LOOK_SECONDS = 0.5


class HarvestsView(ApiView):
    """Harvest jobs."""

    @CREATE_HARVEST
    async def post(self, request: Request) -> Response:
        """Create a Harvest job.

        The residual stream at the chosen layers, for each token of up to 4,096 prompts, written as files that you
        download by the links in its `result`. It holds `reserved_tokens` from now to its end and is charged the tokens
        that the engine read. Only this route takes a body of up to 50 MiB.
        """
        in_thread = is_large(request)
        once = await in_thread_if(in_thread, self._read_once, request)
        if once is not None and (job_id := await find_work_async(once)) is not None:
            return Response(await _answer(request, job_id))
        fields = await in_thread_if(in_thread, HarvestRequestSerializer.validated, self.json)
        model = (await catalogue()).get(fields["model"])
        plan = await in_thread_if(in_thread, plan_harvest, fields, model)
        await require_spending_async()
        user, key = _caller(request)
        try:
            # Shielded: a client that leaves cancels the view, and the job must end when no runner comes.
            job = await asyncio.shield(asyncio.create_task(_submit(user, key, plan, once), name="submit-harvest"))
        except services.AlreadySubmitted as already:
            return Response(await _answer(request, already.job_id))
        if job.runner_due_at is None:
            answer = job_as_json(job, base_url=base_url(request._request))
        else:
            # While it waited for a runner, one may have come, and the job may have been cancelled.
            answer = await _answer(request, job.pk)
        return Response(answer, status=202, headers={"Location": f"/v1/harvest/{job.pk}"})

    def _read_once(self, request: Request) -> IdempotentRequest | None:
        key = read_idempotency_key(request, required=False)
        if key is None:
            return None
        user, _ = _caller(request)
        return idempotent_request(user_id=user.pk, key=key, route="POST /v1/harvest", body=self.json)

    @LIST_HARVESTS
    async def get(self, request: Request) -> Response:
        """List Harvest jobs.

        The User's, of all their keys, newest first.
        """
        asked = read_list_query(request._request.GET, statuses=HarvestJob.Status.values, noun="Harvest job")
        address = base_url(request._request)

        def read() -> dict[str, Any]:
            page = selectors.list_harvests(_caller(request)[0], asked)
            return page.as_json(lambda job: job_as_json(job, base_url=address))

        return Response(await database_step(read))


class HarvestView(ApiView):
    """One Harvest job."""

    @GET_HARVEST
    async def get(self, request: Request, job_id: uuid.UUID) -> Response:
        """Get a Harvest job.

        With `wait`, as soon as its status changes or the seconds are over. A `done` job has its `result`, whose links
        need no key and work for 7 days; each answer makes new ones.
        """
        seconds = query_integer(request._request.GET, "wait", default=0, min_value=0, max_value=WAIT_AT_MOST)
        user, key = _caller(request)
        job = await database_step(selectors.harvest_of, user, job_id)
        has_waited = (
            not seconds
            or job.is_ended
            or await wait_for_change(
                job_id,
                seen=str(job.status),
                seconds=seconds,
                key=str(key.pk),
                at_once=limit_of(user, "harvest_waits_at_once") or 0,
            )
        )
        return Response(await _answer(request, job_id), headers={} if has_waited else DECLINED)

    @DELETE_HARVEST
    async def delete(self, request: Request, job_id: uuid.UUID) -> Response:
        """Delete (cancel) a Harvest job.

        The same as its cancel route: the answer is the job, and one that has ended stays as it is.
        """
        return await _cancel(request, job_id)


class HarvestCancelView(ApiView):
    """The cancelling of a Harvest job."""

    takes_json = False

    @CANCEL_HARVEST
    async def post(self, request: Request, job_id: uuid.UUID) -> Response:
        """Cancel a Harvest job.

        At once, pending or running, and answer the job. One that has ended stays as it is. It is charged its
        `reserved_tokens` when its run had started, else nothing.
        """
        return await _cancel(request, job_id)


def _caller(request: Request) -> tuple[User, ApiKey]:
    return cast("User", request.user), cast("ApiKey", request.auth)


async def _submit(user: User, key: ApiKey, plan: services.HarvestPlan, once: IdempotentRequest | None) -> HarvestJob:
    """Submit the job, and wait for a runner of its model within the grace when none is there.

    Without one the job ends, and `503 harvest_unavailable`.
    """
    job = await database_step(services.submit_harvest, user=user, api_key=key, plan=plan, request=once)
    if job.runner_due_at is not None:
        await _require_runner(job)
    return job


async def _require_runner(job: HarvestJob) -> None:
    deadline = time.monotonic() + settings.RUNNER_GRACE.total_seconds()
    while not await selectors.is_runner_registered(job.base_model_id):
        if time.monotonic() >= deadline:
            error = services.NO_RUNNER.format(model=job.model)
            if await database_step(services.fail_unavailable, job_id=job.pk, error=error):
                raise ApiError(
                    ErrorCode.HARVEST_UNAVAILABLE, f"{error} Try again later.", extra={"job_id": str(job.pk)}
                )
            return
        await asyncio.sleep(RUNNER_LOOK_SECONDS)
    await database_step(services.take_in, job_id=job.pk)


async def _cancel(request: Request, job_id: uuid.UUID) -> Response:
    await database_step(selectors.harvest_of, _caller(request)[0], job_id)
    await database_step(services.cancel_harvest, job_id=job_id)
    return Response(await _answer(request, job_id))


async def _answer(request: Request, job_id: uuid.UUID) -> dict[str, Any]:
    # Links take their time: they are made in the step's thread.
    def read() -> dict[str, Any]:
        return job_as_json(selectors.harvest_of(_caller(request)[0], job_id), base_url=base_url(request._request))

    return await database_step(read)
