"""`manifest.json`: what a run wrote, in enough words to read it without us."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from acsinfra.core.storage import StoredObject
from harvest.models import HarvestJob
from harvest.runner.shards import ShardLayout

LAYOUT_VERSION: Final = 1
LAYER_CONVENTION: Final = (
    "Layer k is the residual stream after decoder block k, counted from 0 (HuggingFace's hidden_states[k + 1]); the "
    "last layer is the stream before the final norm."
)
TENSORS: Final = (
    "prompt_{i}: [layers, tokens, hidden], layers in the order of layer_indices, i the prompt's index in the request; "
    "tokens_{i}: int32 [tokens], the ids that the model read."
)
PROJECTED_TENSORS: Final = TENSORS.replace("hidden", "directions")
STATISTICS: Final = (
    "mean and std (of the population) float32 over all tokens of the run, mean_token_norm float32 [layers] the mean "
    "length of a token's vector, count int64 [1] the tokens. Left out is each prompt's start token: position 0 where "
    "its id is the model's BOS. Zeros where no token is left."
)


def write_manifest(
    *,
    job: HarvestJob,
    checkpoint: str,
    dtype: str,
    layouts: Sequence[ShardLayout],
    shards: Mapping[int, StoredObject],
    stats: StoredObject,
    tokens: int,
    n_directions: int | None,
) -> bytes:
    """The manifest as JSON. `checkpoint` is the checkpoint's name; `dtype` that of the values."""
    manifest: dict[str, Any] = {
        "layout_version": LAYOUT_VERSION,
        "job_id": str(job.pk),
        "run_id": str(job.run_id),
        "model": job.model,
        "checkpoint": checkpoint,
        "dtype": dtype,
        "contents": str(job.contents),
        "layer_indices": job.layers,
        "layer_convention": LAYER_CONVENTION,
        "tensors": TENSORS if n_directions is None else PROJECTED_TENSORS,
        "shard_size": job.shard_size,
        "batch_size": job.batch_size,
        "add_special_tokens": job.add_special_tokens,
        "n_prompts": job.n_prompts,
        "tokens": tokens,
        "shards": [_shard(layout, shards[layout.index]) for layout in layouts],
        "stats": {"key": stats.key, "bytes": stats.bytes, "sha256": stats.sha256},
        "statistics": STATISTICS,
    }
    if n_directions is not None:
        manifest["projections"] = {"normalized": True, "directions": n_directions}
    return json.dumps(manifest, indent=1).encode()


def _shard(layout: ShardLayout, stored: StoredObject) -> dict[str, Any]:
    return {
        "key": stored.key,
        "bytes": stored.bytes,
        "sha256": stored.sha256,
        "prompts": [
            {"index": prompt.index, "shape": list(layout.shape(prompt)), "cut": prompt.is_cut}
            for prompt in layout.prompts
        ],
    }
