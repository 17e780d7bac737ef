"""The views of `/v1/completion-jobs`."""

import asyncio
import uuid
from typing import Any, cast

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import ApiKey, User
from acsinfra.core.api_view import ApiView, is_large
from acsinfra.core.db import database_step
from acsinfra.core.errors import ApiError, invalid
from acsinfra.core.idempotency import (
    IdempotentRequest,
    find_work_async,
    idempotent_request,
    read_idempotency_key,
)
from acsinfra.core.ids import new_uuid7
from acsinfra.core.listing import read_list_query
from acsinfra.core.threads import in_thread_if
from budgets.spend import require_spending_async
from inference.completions import prepare_completion
from inference.selectors import catalogue
from jobs import selectors
from jobs.cancelling import cancel
from jobs.models import CompletionJob
from jobs.results import answer_result
from jobs.schema import CANCEL_JOB, CREATE_JOB, GET_JOB, GET_RESULT, LIST_JOBS
from jobs.serializers import job_as_json
from jobs.submitting import submit_job_async
from jobs.telling import tell_to_look

ROUTE = "POST /v1/completion-jobs"


class JobsView(ApiView):
    """Completion Jobs."""

    @CREATE_JOB
    async def post(self, request: Request) -> Response:
        """Create a Completion Job.

        Runs one Completion on the server, to its end, also when your script stops or your connection drops, and keeps
        its result for 30 days. The body is that of `POST /v1/completions`, without `stream`. The Hold is taken when
        the Job runs.
        """
        text = read_idempotency_key(request, required=True)
        assert text is not None
        once = await in_thread_if(is_large(request), _as_idempotent, _caller(request)[0].pk, text, self.json)
        try:
            return await self._submit(request, once)
        except ApiError:
            # A retry of accepted work gets its answer, whatever it would meet today: looked for only now, because
            # nearly every request is the first of its key, and the unique index decides whether it is.
            made = await find_work_async(once)
            if made is None:
                raise
            return Response(job_as_json(await _job(request, made)))

    async def _submit(self, request: Request, once: IdempotentRequest) -> Response:
        user, key = _caller(request)
        if self.json.get("stream") is True:
            raise invalid("stream must be false: a Job's result is fetched when it is there.", param="stream")
        job_id = new_uuid7()
        models = await catalogue()
        work = await prepare_completion(
            self.json, catalogue=models, request_id=f"req_job_{job_id.hex}", is_large=is_large(request)
        )
        model = models.get(work.model)
        await require_spending_async()
        job = await submit_job_async(
            user=user, api_key=key, base_model_id=model.id, job_id=job_id, work=work, request=once
        )
        answer = job_as_json(job)
        if job.pk != job_id:
            return Response(answer)
        # Where no engine serves, messages would only pile up.
        if model.inference_status == "live":
            tell_to_look(model.name)
        return Response(answer, status=202, headers={"Location": answer["status_url"]})

    @LIST_JOBS
    async def get(self, request: Request) -> Response:
        """List Completion Jobs.

        The User's, of all their keys, newest first.
        """
        asked = read_list_query(request._request.GET, statuses=CompletionJob.Status.values, noun="Job")
        page = await database_step(selectors.list_jobs, _caller(request)[0], asked)
        return Response(page.as_json(job_as_json))


class JobView(ApiView):
    """One Completion Job."""

    @GET_JOB
    async def get(self, request: Request, job_id: uuid.UUID) -> Response:
        """Get a Completion Job.

        As it is now. 200 means that the Job was read, not that its Completion succeeded.
        """
        return Response(job_as_json(await _job(request, job_id)))


class JobResultView(ApiView):
    """The result of a Completion Job."""

    @GET_RESULT
    async def get(self, request: Request, job_id: uuid.UUID) -> HttpResponseBase:
        """Get a Completion Job's result.

        What the Completion answered, with its status: 200 and the Completion, or its error with `request_id` beside
        `error`. While the Job waits or runs, 202 and the Job.
        """
        job = await _job(request, job_id)
        if not job.is_ended:
            return Response(job_as_json(job), status=202, headers={"Retry-After": "1"})
        return await answer_result(job)


class JobCancelView(ApiView):
    """The cancelling of a Completion Job."""

    takes_json = False

    @CANCEL_JOB
    async def post(self, request: Request, job_id: uuid.UUID) -> Response:
        """Cancel a Completion Job.

        At once, queued or running, and answer the Job. One that has ended stays as it is.
        """
        job = await _job(request, job_id)
        # Shielded: once begun it is done, whether or not the client waits for it.
        job = await asyncio.shield(asyncio.create_task(cancel(job.pk), name="cancel-job"))
        return Response(job_as_json(job))


def _caller(request: Request) -> tuple[User, ApiKey]:
    return cast("User", request.user), cast("ApiKey", request.auth)


async def _job(request: Request, job_id: uuid.UUID) -> CompletionJob:
    return await database_step(selectors.job_of, _caller(request)[0], job_id)


def _as_idempotent(user_id: int, key: str, body: dict[str, Any]) -> IdempotentRequest:
    return idempotent_request(user_id=user_id, key=key, route=ROUTE, body=body)
