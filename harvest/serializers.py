"""The body of `POST /v1/harvest`, and Harvest jobs as JSON."""

from datetime import datetime
from typing import Any, Final

from django.conf import settings
from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.fields import (
    INT64_MAX,
    FieldFault,
    StrictBooleanField,
    StrictCharField,
    StrictField,
    StrictIntegerField,
    StrictListField,
    StrictSerializer,
)
from acsinfra.core.storage import get_storage
from acsinfra.core.times import iso_utc_ms
from harvest.models import PROMPTS_AT_MOST, HarvestJob
from inference.tensors import TensorSerializer

CODE_POINTS_AT_MOST: Final = 8_000_000
LAYERS: Final = StrictListField(child=StrictIntegerField(min_value=0), min_length=1, max_length=256)


class PromptsField(StrictListField):
    """A corpus of texts."""

    def check(self, value: Any) -> list[str]:
        """The texts; ApiError `corpus_too_large` past 8,000,000 code points."""
        prompts: list[str] = super().check(value)
        code_points = sum(map(len, prompts))
        if code_points > CODE_POINTS_AT_MOST:
            raise ApiError(
                ErrorCode.CORPUS_TOO_LARGE,
                f"prompts has {code_points:,} characters in all; a job takes at most {CODE_POINTS_AT_MOST:,}.",
            )
        return prompts


@extend_schema_field(
    {
        "oneOf": [
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": INT64_MAX},
                "minItems": 1,
                "maxItems": 256,
            },
            {"type": "string", "enum": ["all"]},
        ]
    }
)
class LayersField(StrictField):
    """A list of layers in any order, or "all"."""

    def check(self, value: Any) -> list[int] | None:
        """The layers as given; None for "all"."""
        if value == "all" and type(value) is str:
            return None
        if type(value) is not list:
            raise FieldFault('must be a list of layers or "all".')
        layers: list[int] = LAYERS.check(value)
        return layers


class HarvestRequestSerializer(StrictSerializer):
    """What to read: a corpus, the layers, and how to write them."""

    model = StrictCharField(min_length=1, help_text="A Base model of GET /v1/models whose harvest is on.")
    prompts = PromptsField(
        child=StrictCharField(min_length=1),
        min_length=1,
        max_length=PROMPTS_AT_MOST,
        help_text="Texts, none empty, at most 8,000,000 characters in all. A prompt longer than the model's context "
        "keeps its first context length - 1 tokens.",
    )
    layers = LayersField(
        required=False,
        help_text='In any order, each read once, or "all". Left out: n_layers // 4, // 2 and 3 * n_layers // 4. '
        "Layer k is the residual stream after decoder block k; the last layer is before the final norm.",
    )
    shard_size = StrictIntegerField(
        min_value=1, max_value=PROMPTS_AT_MOST, default=32, help_text="Prompts in each shard file."
    )
    batch_size = StrictIntegerField(
        min_value=1, max_value=64, required=False, help_text="Kept in the manifest; the engine sizes its own batches."
    )
    add_special_tokens = StrictBooleanField(
        default=True, help_text="Add the model's start token. false for text that already starts with one."
    )
    project_onto = TensorSerializer(
        required=False,
        help_text="1 to 64 directions, shape [directions, hidden]: write the residual stream projected onto them, as "
        "float32, instead of the stream. Each is scaled to length 1.",
    )


class TimingsSerializer(serializers.Serializer[Any]):
    """Where the run's seconds went; their sum is the run's length."""

    load_s = serializers.FloatField(help_text="Loading the engine; 0 where it was loaded.")
    forward_s = serializers.FloatField(help_text="Waiting for the model.")
    save_s = serializers.FloatField(help_text="Encoding shards and adding up statistics.")
    upload_s = serializers.FloatField(help_text="Waiting for the file storage.")
    other_s = serializers.FloatField(help_text="What none of these explains.")


class HarvestResultSerializer(serializers.Serializer[Any]):
    """The files of a done job. Links need no API key and work 7 days; each answer makes new ones."""

    n_shards = serializers.IntegerField(help_text="Shard files.")
    layer_indices = serializers.ListField(child=serializers.IntegerField(), help_text="Ascending.")
    manifest_url = serializers.URLField(help_text="The index of all files, as JSON; written last.")
    shard_urls = serializers.ListField(
        child=serializers.URLField(), help_text="safetensors: `prompt_{i}` and `tokens_{i}` for each prompt i."
    )
    stats_url = serializers.URLField(help_text="safetensors: `mean`, `std`, `mean_token_norm` and `count`.")
    contents = serializers.ChoiceField(choices=HarvestJob.Contents.choices, help_text="projections with project_onto.")
    tokens = serializers.IntegerField(help_text="Tokens that the engine read.")
    bytes_written = serializers.IntegerField(help_text="Bytes of all files.")
    timings = TimingsSerializer()


class HarvestProgressSerializer(serializers.Serializer[Any]):
    """How far a running job is."""

    prompts = serializers.IntegerField(help_text="Prompts in finished shards.")
    tokens = serializers.IntegerField(help_text="Their tokens.")
    bytes_written = serializers.IntegerField(help_text="Bytes of the files so far.")


class HarvestJobSerializer(serializers.Serializer[Any]):
    """A Harvest job, as every route answers it."""

    job_id = serializers.UUIDField(help_text="A UUIDv7: later jobs sort later.")
    run_id = serializers.UUIDField(help_text="Made at submit; the manifest names it.")
    status = serializers.ChoiceField(
        choices=HarvestJob.Status.choices,
        help_text="pending while it waits for a runner, then running, then done, failed or cancelled.",
    )
    model = serializers.CharField(help_text="The Base model.")
    n_prompts = serializers.IntegerField(help_text="How many prompts it has.")
    reserved_tokens = serializers.IntegerField(help_text="Each prompt's UTF-8 bytes and 1 more: held until it ends.")
    layers = serializers.ListField(child=serializers.IntegerField(), help_text="Ascending.")
    tokens = serializers.IntegerField(allow_null=True, help_text="What it was charged; null until it ends.")
    created_at = serializers.DateTimeField(help_text="Such as 2026-11-03T09:30:00.123+00:00.")
    started_at = serializers.DateTimeField(allow_null=True, help_text="When a runner first claimed it.")
    completed_at = serializers.DateTimeField(allow_null=True, help_text="When it ended.")
    result = HarvestResultSerializer(required=False, help_text="Of a done job whose files are kept.")
    urls_expire_at = serializers.DateTimeField(required=False, help_text="With result.")
    error = serializers.CharField(required=False, help_text="Of a failed job.")
    progress = HarvestProgressSerializer(required=False, help_text="While it runs.")


class HarvestJobListSerializer(serializers.Serializer[Any]):
    """A page of Harvest jobs, newest first."""

    object = serializers.ChoiceField(choices=["list"])
    data = HarvestJobSerializer(many=True)  # type: ignore[assignment]  # DRF's own `data` is a property
    has_more = serializers.BooleanField(help_text="Whether older ones follow: ask with after.")


def job_as_json(job: HarvestJob, *, base_url: str) -> dict[str, Any]:
    """The job with the keys of `HarvestJobSerializer`; a done one with new links that begin with `base_url`."""
    answer: dict[str, Any] = {
        "job_id": str(job.pk),
        "run_id": str(job.run_id),
        "status": str(job.status),
        "model": job.model,
        "n_prompts": job.n_prompts,
        "reserved_tokens": job.reserved_tokens,
        "layers": job.layers,
        "tokens": job.tokens,
        "created_at": iso_utc_ms(job.created_at),
        "started_at": _time(job.started_at),
        "completed_at": _time(job.completed_at),
    }
    if job.status == HarvestJob.Status.DONE and job.files_deleted_at is None:
        expires_at = timezone.now() + settings.LINKS_EXPIRE_AFTER
        answer["result"] = _result(job, expires_at=expires_at, base_url=base_url)
        answer["urls_expire_at"] = iso_utc_ms(expires_at)
    if job.status == HarvestJob.Status.FAILED:
        answer["error"] = job.error
    if job.status == HarvestJob.Status.RUNNING:
        answer["progress"] = {
            "prompts": job.prompts_done,
            "tokens": job.tokens_done,
            "bytes_written": job.bytes_written,
        }
    return answer


def _result(job: HarvestJob, *, expires_at: datetime, base_url: str) -> dict[str, Any]:
    storage = get_storage()

    def link(key: str) -> str:
        return storage.link(key, expires_at=expires_at, base_url=base_url)

    result = job.result or {}
    shards = job.shards.all()
    return {
        "n_shards": len(shards),
        "layer_indices": job.layers,
        "manifest_url": link(result["manifest_key"]),
        "shard_urls": [link(shard.key) for shard in shards],
        "stats_url": link(result["stats_key"]),
        "contents": str(job.contents),
        "tokens": result["tokens"],
        "bytes_written": result["bytes_written"],
        "timings": result["timings"],
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else iso_utc_ms(moment)
