"""What a page shows of a harvest's files: links with sizes, the mean norm by layer, the first prompts."""

import io
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import zstandard
from django.conf import settings
from django.utils import timezone
from safetensors import SafetensorError
from safetensors.numpy import load

from acsinfra.core.plots import Plot, plot_line
from acsinfra.core.storage import StorageError, get_storage
from harvest.models import HarvestJob

SHARDS_A_PAGE: Final = 20
PROMPTS_SHOWN: Final = 5
PROMPT_CHARACTERS: Final = 400
_HEAD_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class FileLink:
    """A file of a harvest; `bytes` is None where it is not known without asking the storage."""

    name: str
    url: str
    bytes: int | None


@dataclass(frozen=True)
class HarvestFiles:
    """The links of a page: manifest, statistics and the shards from `first_shard` on."""

    links: tuple[FileLink, ...]
    n_shards: int
    first_shard: int
    next_shard: int | None
    expire_at: datetime


@dataclass(frozen=True)
class ShownStatistics:
    """The mean length of a token's vector by layer."""

    layers: tuple[int, ...]
    norms: tuple[float, ...]
    tokens: int
    plot: Plot

    @property
    def rows(self) -> list[tuple[int, float]]:
        """Each layer with its norm."""
        return list(zip(self.layers, self.norms, strict=True))


def files_of(job: HarvestJob, *, base_url: str, first_shard: int = 0) -> HarvestFiles | None:
    """New links to a done job's files, `SHARDS_A_PAGE` shards at a time; None where it has none (any more)."""
    if job.status != HarvestJob.Status.DONE or job.files_deleted_at is not None or job.result is None:
        return None
    storage = get_storage()
    expire_at = timezone.now() + settings.LINKS_EXPIRE_AFTER

    def link(key: str, size: int | None) -> FileLink:
        url = storage.link(key, expires_at=expire_at, base_url=base_url)
        return FileLink(name=key.rpartition("/")[2], url=url, bytes=size)

    n_shards = job.shards.count()
    shards = job.shards.filter(index__gte=first_shard)[:SHARDS_A_PAGE]
    links = [link(shard.key, shard.bytes) for shard in shards]
    if first_shard == 0:
        # Jobs of former versions have not noted these sizes.
        of_all = [(job.result[f"{name}_key"], job.result.get(f"{name}_bytes")) for name in ("manifest", "stats")]
        links = [*(link(key, size) for key, size in of_all), *links]
    after = first_shard + SHARDS_A_PAGE
    return HarvestFiles(tuple(links), n_shards, first_shard, after if after < n_shards else None, expire_at)


def statistics_of(job: HarvestJob) -> ShownStatistics | None:
    """The norms of a done job's `stats.safetensors`; None where it cannot be read now."""
    if job.result is None or job.files_deleted_at is not None:
        return None
    try:
        stats = load(get_storage().read(job.result["stats_key"]))
    except (StorageError, SafetensorError):
        return None
    norms = tuple(float(norm) for norm in stats["mean_token_norm"])
    return ShownStatistics(
        layers=tuple(job.layers),
        norms=norms,
        tokens=int(stats["count"][0]),
        plot=plot_line(job.layers, norms, x_name="layer"),
    )


def first_prompts(prompts_zstd: bytes) -> list[str]:
    """The first prompts of a corpus, each cut to `PROMPT_CHARACTERS`; only the head of it is decompressed."""
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(prompts_zstd)) as reader:
        head = reader.read(_HEAD_BYTES).decode(errors="ignore")
    decoder, at, prompts = json.JSONDecoder(), 1, list[str]()
    while len(prompts) < PROMPTS_SHOWN and at < len(head):
        try:
            prompt, end = decoder.raw_decode(head, at)
        except ValueError:
            # Longer than the head.
            prompts.append(head[at + 1 :][:PROMPT_CHARACTERS] + "…")
            break
        prompts.append(prompt if len(prompt) <= PROMPT_CHARACTERS else prompt[:PROMPT_CHARACTERS] + "…")
        at = end + len(head[end:]) - len(head[end:].lstrip(", "))
        if head[end : end + 1] == "]":
            break
    return prompts
