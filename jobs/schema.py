"""What the OpenAPI document says of `/v1/completion-jobs`. A test sends every example."""

from typing import Any, Final

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse

from acsinfra.core.errors import ErrorCode
from acsinfra.core.schema import WorkSchema, documented
from inference.answer_serializers import CompletionSerializer
from inference.schema import ANSWERS, OF_THE_ENGINE, OF_THE_FIELDS, REQUESTS, idempotency_parameter
from jobs.models import CompletionJob
from jobs.serializers import (
    CompletionJobListSerializer,
    CompletionJobRequestSerializer,
    CompletionJobSerializer,
)

TAG: Final = "Jobs"
JOB_ID: Final = "01a19d8b-2892-7afa-8b51-35c9fc2f5572"
PATH: Final = f"/v1/completion-jobs/{JOB_ID}"
QUEUED: Final[dict[str, Any]] = {
    "id": JOB_ID,
    "request_id": f"req_job_{JOB_ID.replace('-', '')}",
    "model": "smollm2-135m",
    "status": "queued",
    "cancel_requested": False,
    "created_at": "2026-11-02T18:35:05.226+00:00",
    "started_at": None,
    "finished_at": None,
    "expires_at": None,
    "result_expired": False,
    "status_url": PATH,
    "result_url": f"{PATH}/result",
    "usage_pending": False,
}
SUCCEEDED: Final = QUEUED | {
    "status": "succeeded",
    "started_at": "2026-11-02T18:35:05.245+00:00",
    "finished_at": "2026-11-02T18:35:05.287+00:00",
    "expires_at": "2026-12-02T18:35:05.287+00:00",
}
CANCELLED: Final = SUCCEEDED | {"status": "cancelled", "cancel_requested": True, "started_at": None}


JOB: Final = WorkSchema(tag=TAG, noun="Job", serializer=CompletionJobSerializer, page=CompletionJobListSerializer)
CREATE_JOB = JOB.documented_submit(
    operation_id="create_completion_job",
    request=CompletionJobRequestSerializer,
    parameters=[
        idempotency_parameter("Sent again with the same request, it is the same Job, charged once.", required=True)
    ],
    responses={
        202: JOB.answer("The new Job.", queued=QUEUED),
        200: JOB.answer("The Job that this Idempotency-Key made, as it is now.", succeeded=SUCCEEDED),
    },
    errors=[
        *OF_THE_FIELDS,
        ErrorCode.IDEMPOTENCY_CONFLICT,
        ErrorCode.JOB_CAPACITY,
        ErrorCode.BUDGET_EXCEEDED,
        ErrorCode.SPEND_CAP,
    ],
    examples={name: REQUESTS[name] for name in ("text", "activations")},
)
LIST_JOBS = JOB.documented_list(
    operation_id="list_completion_jobs", statuses=CompletionJob.Status.values, example=SUCCEEDED
)
GET_JOB = JOB.documented_get(operation_id="get_completion_job", answer=JOB.answer("The Job.", succeeded=SUCCEEDED))
GET_RESULT = documented(
    operation_id="get_completion_job_result",
    tag=TAG,
    parameters=[
        OpenApiParameter(
            "Retry-After",
            OpenApiTypes.INT,
            OpenApiParameter.HEADER,
            description="Seconds after which to ask again.",
            response=[202],
        )
    ],
    responses={
        200: OpenApiResponse(
            CompletionSerializer,
            description="The Completion.",
            examples=[OpenApiExample("text", value=ANSWERS["text"])],
        ),
        202: JOB.answer("The Job, which has not ended.", queued=QUEUED),
    },
    errors=[
        ErrorCode.NOT_FOUND,
        *OF_THE_FIELDS,
        ErrorCode.JOB_CANCELLED,
        ErrorCode.JOB_RESULT_EXPIRED,
        ErrorCode.BUDGET_EXCEEDED,
        ErrorCode.JOB_FAILED,
        *OF_THE_ENGINE,
    ],
)
CANCEL_JOB = JOB.documented_cancel(operation_id="cancel_completion_job", example=CANCELLED)
