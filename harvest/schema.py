"""What the OpenAPI document says of `/v1/harvest`. A test sends every example."""

from typing import Any, Final

from drf_spectacular.utils import OpenApiParameter
from rest_framework.fields import empty

from acsinfra.core.errors import ErrorCode
from acsinfra.core.schema import WorkSchema, response_header
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


HARVEST: Final = WorkSchema(tag=TAG, noun="job", serializer=HarvestJobSerializer, page=HarvestJobListSerializer)
CREATE_HARVEST = HARVEST.documented_submit(
    operation_id="create_harvest",
    request=HarvestRequestSerializer,
    parameters=[idempotency_parameter("A retry with the same key and request gets the same job and is charged once.")],
    responses={
        202: HARVEST.answer("The new job.", pending=PENDING),
        200: HARVEST.answer("The job that this Idempotency-Key made, as it is now.", done=DONE),
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
LIST_HARVESTS = HARVEST.documented_list(
    operation_id="list_harvests", statuses=HarvestJob.Status.values, example=CANCELLED
)
GET_HARVEST = HARVEST.documented_get(
    operation_id="get_harvest",
    answer=HARVEST.answer("The job as it is now.", running=RUNNING, done=DONE),
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
)
# A DELETE has no body to describe.
DELETE_HARVEST = HARVEST.documented_cancel(operation_id="delete_harvest", example=CANCELLED, request=empty)
CANCEL_HARVEST = HARVEST.documented_cancel(operation_id="cancel_harvest", example=CANCELLED)
