"""Completion Jobs and Harvest jobs as one list, newest first, as the pages show them."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from django.db.models import QuerySet
from django.utils import timezone

from accounts.models import User
from harvest.models import HarvestJob
from jobs.models import CompletionJob

type Kind = Literal["completion", "harvest"]

KINDS: Final[Mapping[str, str]] = {"completion": "Completion Jobs", "harvest": "Harvest jobs"}
# One word for what both kinds have: the list filters by these.
STATUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "waiting": ("queued", "pending"),
    "running": ("running",),
    "succeeded": ("succeeded", "done"),
    "failed": ("failed",),
    "cancelled": ("cancelled",),
}
LINES: Final = 25
# An estimate from less than this part of the work is a guess.
SMALLEST_PART: Final = 0.02


@dataclass(frozen=True)
class JobFilter:
    """Which jobs to list; None: all."""

    kind: Kind | None = None
    status: str | None = None
    model: str | None = None
    key_id: int | None = None

    def as_query(self) -> dict[str, str]:
        """The filter as the query of a page."""
        chosen = {"kind": self.kind, "status": self.status, "model": self.model, "key": self.key_id}
        return {name: str(value) for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class JobLine:
    """What a list says of a job. `percent` (0 to 100) and `seconds_left` are of a running one, where they are known.

    `tokens` are those it was charged, or holds while it has not ended; `work` says what it is in a few words.
    """

    kind: Kind
    id: uuid.UUID
    model: str
    status: str
    key_name: str
    work: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    tokens: int
    is_ended: bool
    percent: float | None
    seconds_left: float | None

    @property
    def url_name(self) -> str:
        """The name of its page's route."""
        return "job" if self.kind == "completion" else "harvest-job"

    @property
    def short_id(self) -> str:
        """The end of its id, to tell it from others by."""
        return self.id.hex[-6:]

    @property
    def seconds(self) -> float | None:
        """How long it has run, or ran, from its first start."""
        if self.started_at is None:
            return None
        return ((self.ended_at or timezone.now()) - self.started_at).total_seconds()


@dataclass(frozen=True)
class JobLines:
    """A page of the list, and whether older jobs follow."""

    lines: list[JobLine]
    has_more: bool

    @property
    def is_live(self) -> bool:
        """Whether any of them may still change."""
        return any(not line.is_ended for line in self.lines)


def list_lines(*, user: User, only: JobFilter, after: uuid.UUID | None = None, limit: int = LINES) -> JobLines:
    """The User's jobs of both kinds that are older than the id `after`, newest first.

    Ids of both kinds are UUIDv7, which sort by their time: one statement for each kind, whatever the number of jobs.
    """
    found: list[JobLine] = []
    if only.kind != "harvest":
        jobs = CompletionJob.objects.filter(user=user)
        found += [completion_line(job) for job in _chosen(jobs, only, after, limit)]
    if only.kind != "completion":
        harvests = HarvestJob.objects.filter(user=user)
        found += [harvest_line(job) for job in _chosen(harvests, only, after, limit)]
    found.sort(key=lambda line: line.id, reverse=True)
    return JobLines(lines=found[:limit], has_more=len(found) > limit)


def _chosen(jobs: QuerySet[Any], only: JobFilter, after: uuid.UUID | None, limit: int) -> QuerySet[Any]:
    if after is not None:
        jobs = jobs.filter(pk__lt=after)
    if only.status is not None:
        jobs = jobs.filter(status__in=STATUSES[only.status])
    if only.model is not None:
        jobs = jobs.filter(model=only.model)
    if only.key_id is not None:
        jobs = jobs.filter(api_key_id=only.key_id)
    return jobs.select_related("api_key").order_by("-pk")[: limit + 1]


def completion_line(job: CompletionJob) -> JobLine:
    """A Completion Job as a line. Its part done is what a worker last counted of the most that it may come to."""
    part = None
    if job.status == CompletionJob.Status.RUNNING and job.counted_tokens is not None:
        part = min(1.0, job.counted_tokens / max(1, job.hold_tokens))
    return JobLine(
        kind="completion",
        id=job.pk,
        model=job.model,
        status=str(job.status),
        key_name=_key_name(job),
        work="Completion",
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.finished_at,
        tokens=job.hold_tokens if job.charged_tokens is None else job.charged_tokens,
        is_ended=job.is_ended,
        percent=None if part is None else round(100 * part, 1),
        seconds_left=_seconds_left(part, job.started_at),
    )


def harvest_line(job: HarvestJob) -> JobLine:
    """A Harvest job as a line. Its part done is that of its prompts."""
    is_running = job.status == HarvestJob.Status.RUNNING
    part = job.prompts_done / max(1, job.n_prompts) if is_running else None
    return JobLine(
        kind="harvest",
        id=job.pk,
        model=job.model,
        status=str(job.status),
        key_name=_key_name(job),
        work=f"Harvest of {job.n_prompts:,} {'prompt' if job.n_prompts == 1 else 'prompts'}",
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.completed_at,
        tokens=job.reserved_tokens if job.tokens is None else job.tokens,
        is_ended=job.is_ended,
        percent=None if part is None else round(100 * part, 1),
        seconds_left=_seconds_left(part, job.started_at),
    )


def _key_name(job: CompletionJob | HarvestJob) -> str:
    return job.api_key.name if job.api_key is not None else ""


def _seconds_left(part: float | None, started_at: datetime | None) -> float | None:
    if part is None or part < SMALLEST_PART or started_at is None:
        return None
    taken = max(timedelta(0), timezone.now() - started_at).total_seconds()
    return taken * (1 - part) / part
