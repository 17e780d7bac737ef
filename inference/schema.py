"""What the OpenAPI document says of `/v1/models` and `/v1/completions`. A test sends every example."""

import base64
from typing import Any, Final

import zstandard
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse

from acsinfra.core.errors import ErrorCode
from acsinfra.core.idempotency import HEADER, MAX_KEY_CHARACTERS
from acsinfra.core.schema import documented
from inference.answer_serializers import CompletionChunkSerializer, CompletionSerializer
from inference.serializers import CompletionRequestSerializer, ModelListSerializer, ModelSerializer

# Of smollm2-135m, the model of the examples.
HIDDEN_SIZE: Final = 576
MODEL: Final = "smollm2-135m"
CHECKPOINT: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"


def idempotency_parameter(description: str, *, required: bool = False) -> OpenApiParameter:
    """The header Idempotency-Key of a request."""
    return OpenApiParameter(
        HEADER,
        # Header values are bytes; what clients agree on is printable ASCII.
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS, "pattern": "^[!-~]([ -~]*[!-~])?$"},
        OpenApiParameter.HEADER,
        required=required,
        description=f"1 to 255 printable characters of your choice, such as a UUID. {description} Kept 24 hours, one "
        "set for each User across all their API keys.",
    )


def tensor_example(*shape: int) -> dict[str, Any]:
    """A tensor of ones, float32, compressed."""
    size = 1
    for length in shape:
        size *= length
    ones = b"\0\0\x80?" * size
    return {
        "data": base64.b64encode(zstandard.compress(ones)).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(shape),
        "compression": "zstd",
    }


PROMPT: Final = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "text": PROMPT,
    "logprobs": {**PROMPT, "logprobs": 2},
    "score a text": {**PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0},
    "several prompts": {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 4, "n": 2, "seed": 7},
    "stream": {**PROMPT, "stream": True, "stream_options": {"include_usage": True}},
    "activations": {**PROMPT, "output_residual_stream": [0, 2]},
    "steering": {
        **PROMPT,
        "apply_steering_vectors": [
            {"activations": tensor_example(1, HIDDEN_SIZE), "layer_indices": [2], "scale": 4.0, "norm_match": False}
        ],
    },
}

CHOICE: Final[dict[str, Any]] = {
    "index": 0,
    "text": " Paris. It is",
    "logprobs": None,
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": None,
    "prompt_logprobs": None,
    "prompt_token_ids": None,
}
COMPLETION: Final[dict[str, Any]] = {
    "id": "cmpl-5f0c1a52b7a94d8f9f3c7f4f0a1b2c3d",
    "object": "text_completion",
    "created": 1796000000,
    "model": CHECKPOINT,
    "choices": [CHOICE],
    "service_tier": None,
    "system_fingerprint": None,
    "usage": {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4},
}
LOGPROBS: Final[dict[str, Any]] = {
    "text_offset": [0, 6, 7, 10],
    "token_logprobs": [-0.31, -0.52, -1.9, -0.44],
    "tokens": [" Paris", ".", " It", " is"],
    "top_logprobs": [
        {" Paris": -0.31, " the": -2.7, " located": -3.4},
        {".": -0.52, ",": -1.1, " and": -3.9},
        {" It": -1.9, "\n": -1.7, " The": -2.0},
        {" is": -0.44, "'s": -1.6, " has": -3.1},
    ],
}
ACTIVATIONS: Final[dict[str, Any]] = {
    "residual_stream": {
        **tensor_example(2, 8, HIDDEN_SIZE),
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
    }
}
ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "text": COMPLETION,
    "logprobs": {**COMPLETION, "choices": [{**CHOICE, "logprobs": LOGPROBS}]},
    "activations": {**COMPLETION, "activations": ACTIVATIONS},
}
EVENTS: Final = (
    'data: {"id":"cmpl-5f0c1a52b7a94d8f9f3c7f4f0a1b2c3d","object":"text_completion","created":1796000000,'
    f'"model":"{CHECKPOINT}","choices":[{{"index":0,"text":" Paris","logprobs":null,"finish_reason":null,'
    '"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
    'data: {"id":"cmpl-5f0c1a52b7a94d8f9f3c7f4f0a1b2c3d","object":"text_completion","created":1796000000,'
    f'"model":"{CHECKPOINT}","choices":[],'
    '"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4}}\n\n'
    "data: [DONE]\n\n"
)

MODEL_EXAMPLE: Final[dict[str, Any]] = {
    "id": MODEL,
    "object": "model",
    "created": 1796000000,
    "owned_by": "acsinfra",
    "served_model_name": CHECKPOINT,
    "status": "live",
    "capabilities": {
        "max_model_len": 8192,
        "n_layers": 30,
        "hidden_size": HIDDEN_SIZE,
        "max_logprobs": 100,
        "activations": True,
        "steering": True,
        "harvest": True,
        "max_activation_prompt_tokens": 3883,
        "full_vocab_max_prompt_tokens": 81,
    },
}

# What the fields, the model and the prompt's length may be refused for, before any work.
OF_THE_FIELDS: Final = (
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.ACTIVATION_PROMPT_TOO_LONG,
    ErrorCode.FULL_VOCAB_PROMPT_TOO_LONG,
)
# What a Completion may end in once it has begun.
OF_THE_ENGINE: Final = (
    ErrorCode.ENGINE_ERROR,
    ErrorCode.ENGINE_TIMEOUT,
)

LIST_MODELS = documented(
    operation_id="list_models",
    tag="Models",
    responses={
        200: OpenApiResponse(
            ModelListSerializer,
            description="The Base models that are switched on.",
            examples=[OpenApiExample("models", value={"object": "list", "data": [MODEL_EXAMPLE]})],
        )
    },
)
GET_MODEL = documented(
    operation_id="get_model",
    tag="Models",
    responses={
        200: OpenApiResponse(
            ModelSerializer, description="The model.", examples=[OpenApiExample("model", value=MODEL_EXAMPLE)]
        )
    },
    errors=[(ErrorCode.MODEL_NOT_FOUND, 404)],
)
CREATE_COMPLETION = documented(
    operation_id="create_completion",
    tag="Completions",
    request=CompletionRequestSerializer,
    parameters=[
        idempotency_parameter(
            "Not with `stream`. A retry with the same key and request gets the first answer, is charged once, and the "
            "first request runs to its end also when its client goes away."
        )
    ],
    responses={
        (200, "application/json"): OpenApiResponse(
            CompletionSerializer,
            description="The Completion; with `stream` server-sent events.",
            examples=[OpenApiExample(name, value=body) for name, body in ANSWERS.items()],
        ),
        (200, "text/event-stream"): OpenApiResponse(
            CompletionChunkSerializer,
            examples=[OpenApiExample("stream", value=EVENTS)],
        ),
    },
    errors=[
        *OF_THE_FIELDS,
        ErrorCode.IDEMPOTENCY_CONFLICT,
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        ErrorCode.QUEUE_FULL,
        ErrorCode.BUDGET_EXCEEDED,
        ErrorCode.SPEND_CAP,
        *OF_THE_ENGINE,
        ErrorCode.MODEL_UNAVAILABLE,
        ErrorCode.MODEL_STARTING,
    ],
    examples=REQUESTS,
)
