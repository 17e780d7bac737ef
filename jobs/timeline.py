"""The times of a job as a small timeline."""

from dataclasses import dataclass
from datetime import datetime

from jobs.listing import JobLine


@dataclass(frozen=True)
class Moment:
    """Something that happened to a job, and the seconds since what happened before (None: the first)."""

    name: str
    at: datetime
    seconds: float | None
    what: str


def timeline(line: JobLine) -> list[Moment]:
    """Submitted, started, ended: what has happened until now."""
    moments = [Moment("Submitted", line.created_at, None, "")]
    if line.started_at is not None:
        moments.append(Moment("Started", line.started_at, _between(line.created_at, line.started_at), "waited"))
    if line.ended_at is not None:
        before = line.started_at or line.created_at
        what = "ran" if line.started_at is not None else "waited"
        name = {"cancelled": "Cancelled", "failed": "Failed"}.get(line.status, "Ended")
        moments.append(Moment(name, line.ended_at, _between(before, line.ended_at), what))
    return moments


def _between(first: datetime, second: datetime) -> float:
    return max(0.0, (second - first).total_seconds())
