"""What the OpenAPI document says of `/v1/harvest`. A test sends every example."""

from typing import Any, Final

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse

from acsinfra.core.errors import ErrorCode
from acsinfra.core.schema import documented, page_parameters, response_header
from harvest.models import HarvestJob
from harvest.serializers import HarvestJobListSerializer, HarvestJobSerializer, HarvestRequestSerializer
from inference.schema import HIDDEN_SIZE, MODEL, idempotency_parameter, tensor_example

TAG: Final = "Harvest"
JOB_ID: Final = "019a2f4c-1f0e-7c3a-9d55-3a1f0f3f6f10"
WAIT_AT_MOST: Final = 60
PROMPTS: Final = ["The quick brown fox jumps over the lazy dog.", "Interpretability reads the residual stream."]
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "quartiles": {"model": MODEL, "prompts": PROMPTS},
    "chosen layers": {"model": MODEL, "prompts": PROMPTS, "layers": [0, 2], "shard_size": 1},
    "projections": {"model": MODEL, "prompts": PROMPTS, "project_onto": tensor_example(2, HIDDEN_SIZE)},
}
PENDING: Final[dict[str, Any]] = {
    "job_id": JOB_ID,
    "run_id": "dded282c-8ebd-44cf-8ba5-9a234973d1ec",
    "status": "pending",
    "model": MODEL,
    "n_prompts": 2,
    "reserved_tokens": 89,
    "layers": [7, 15, 22],
    "tokens": None,
    "created_at": "2026-11-03T09:30:00.123+00:00",
    "started_at": None,
    "completed_at": None,
}
RUNNING: Final = PENDING | {
    "status": "running",
    "started_at": "2026-11-03T09:30:01.004+00:00",
    "progress": {"prompts": 1, "tokens": 10, "bytes_written": 34560},
}
FILES: Final = "https://acs.example.org/files/eyJrIjoic2hhcmRzIn0"
DONE: Final = PENDING | {
    "status": "done",
    "tokens": 18,
    "started_at": "2026-11-03T09:30:01.004+00:00",
    "completed_at": "2026-11-03T09:30:02.950+00:00",
    "result": {
        "n_shards": 1,
        "layer_indices": [7, 15, 22],
        "manifest_url": f"{FILES}/manifest.json",
        "shard_urls": [f"{FILES}/shard_00000.safetensors"],
        "stats_url": f"{FILES}/stats.safetensors",
        "contents": "activations",
        "tokens": 18,
        "bytes_written": 62_208,
        "timings": {"load_s": 0.0, "forward_s": 0.21, "save_s": 0.01, "upload_s": 0.02, "other_s": 0.01},
    },
    "urls_expire_at": "2026-11-10T09:31:00.000+00:00",
}
CANCELLED: Final = PENDING | {"status": "cancelled", "tokens": 0, "completed_at": "2026-11-03T09:30:00.500+00:00"}


def _answer(description: str, **examples: dict[str, Any]) -> OpenApiResponse:
    return OpenApiResponse(
        HarvestJobSerializer,
        description=description,
        examples=[OpenApiExample(name, value=value) for name, value in examples.items()],
    )


CREATE_HARVEST = documented(
    operation_id="create_harvest",
    tag=TAG,
    request=HarvestRequestSerializer,
    parameters=[
        idempotency_parameter("A retry with the same key and request gets the same job and is charged once."),
        response_header(
            "Location", 202, description="The path of the job.", schema={"type": "string", "format": "uri-reference"}
        ),
    ],
    responses={
        202: _answer("The new job.", pending=PENDING),
        200: _answer("The job that this Idempotency-Key made, as it is now.", done=DONE),
    },
    errors=[
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.HARVEST_UNSUPPORTED,
        ErrorCode.CORPUS_TOO_LARGE,
        ErrorCode.IDEMPOTENCY_CONFLICT,
        ErrorCode.BUDGET_EXCEEDED,
        ErrorCode.SPEND_CAP,
        ErrorCode.HARVEST_CONCURRENCY_EXCEEDED,
        ErrorCode.HARVEST_QUOTA_EXCEEDED,
        ErrorCode.HARVEST_UNAVAILABLE,
    ],
    examples=REQUESTS,
)
LIST_HARVESTS = documented(
    operation_id="list_harvests",
    tag=TAG,
    parameters=page_parameters("job", HarvestJob.Status.values),
    responses={
        200: OpenApiResponse(
            HarvestJobListSerializer,
            description="A page of Harvest jobs.",
            examples=[OpenApiExample("jobs", value={"object": "list", "data": [CANCELLED], "has_more": False})],
        )
    },
)
GET_HARVEST = documented(
    operation_id="get_harvest",
    tag=TAG,
    parameters=[
        OpenApiParameter(
            "wait",
            {"type": "integer", "minimum": 0, "maximum": WAIT_AT_MOST},
            description="Seconds to wait for the status to change. An API key may have 4 such waits at once.",
            default=0,
        ),
        response_header(
            "X-Acs-Longpoll",
            200,
            description="`declined`: the key has all its waits, so this answer came at once.",
            schema={"type": "string", "const": "declined"},
        ),
        response_header(
            "Retry-After",
            200,
            description="With X-Acs-Longpoll: seconds after which to ask again.",
            schema={"type": "integer", "minimum": 1},
        ),
    ],
    responses={200: _answer("The job as it is now.", running=RUNNING, done=DONE)},
    errors=[ErrorCode.NOT_FOUND],
)
DELETE_HARVEST = documented(
    operation_id="delete_harvest",
    tag=TAG,
    responses={200: _answer("The job as it is now.", cancelled=CANCELLED)},
    errors=[ErrorCode.NOT_FOUND, ErrorCode.REQUEST_TOO_LARGE],
)
CANCEL_HARVEST = documented(
    operation_id="cancel_harvest",
    tag=TAG,
    request=None,
    responses={200: _answer("The job as it is now.", cancelled=CANCELLED)},
    errors=[ErrorCode.NOT_FOUND, ErrorCode.REQUEST_TOO_LARGE],
)
