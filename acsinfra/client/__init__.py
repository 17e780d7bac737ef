"""The researchers' client of an ACS Infra server: Completions, Jobs, and harvests of activations.

`Client` (and `AsyncClient`) speak to the server that `ACS_BASE_URL` and `ACS_API_KEY` name; `open_harvest` reads what a
harvest left on the disk, without any server. `steering_vector` and `encode_tensor` make what requests take. All errors
are `AcsError`. Importing it imports neither Django nor torch nor vLLM.
"""

from acsinfra.client.aio import AsyncClient
from acsinfra.client.batches import TokenBatch
from acsinfra.client.client import Client
from acsinfra.client.errors import AcsError
from acsinfra.client.folder import Harvest, LayerView, PromptActivations, Statistics, open_harvest
from acsinfra.client.models import (
    Budget,
    Choice,
    Completion,
    CompletionChunk,
    CompletionJob,
    HarvestJob,
    Model,
)
from acsinfra.client.tensors import decode_tensor, encode_tensor, steering_vector

__all__ = [
    "AcsError",
    "AsyncClient",
    "Budget",
    "Choice",
    "Client",
    "Completion",
    "CompletionChunk",
    "CompletionJob",
    "Harvest",
    "HarvestJob",
    "LayerView",
    "Model",
    "PromptActivations",
    "Statistics",
    "TokenBatch",
    "decode_tensor",
    "encode_tensor",
    "open_harvest",
    "steering_vector",
]
