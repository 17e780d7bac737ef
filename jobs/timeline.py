"""The times of a job as a small timeline."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from django.utils import timezone

from acsinfra.templatetags.shown import duration
from jobs.listing import JobLine

NOW: Final = "now"


@dataclass(frozen=True)
class Moment:
    """Something that happened to a job, and what was between it and the moment before (empty: the first).

    `time` says when in words; `at` is None for the last moment of a job that has not ended: now.
    """

    name: str
    at: datetime | None
    time: str
    between: str


def timeline(line: JobLine) -> list[Moment]:
    """Submitted, started, ended, or how it stands now. A day is named once, and anew where it changes."""
    moments = [Moment("Submitted", line.created_at, f"{line.created_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", "")]
    last = line.created_at
    if line.started_at is not None:
        between = f"waited {duration(_between(last, line.started_at))}"
        moments.append(Moment("Started", line.started_at, _time(line.started_at, last), between))
        last = line.started_at
    if line.ended_at is not None:
        what = "ran" if line.started_at is not None else "waited"
        name = {"cancelled": "Cancelled", "failed": "Failed"}.get(line.status, "Ended")
        between = f"{what} {duration(_between(last, line.ended_at))}"
        moments.append(Moment(name, line.ended_at, _time(line.ended_at, last), between))
    elif line.status != "running" and line.started_at is not None:
        moments.append(Moment(f"{line.status.capitalize()} again", None, NOW, "interrupted"))
    else:
        what = "runs" if line.status == "running" else "waits"
        between = f"{what} for {duration(_between(last, timezone.now()))}"
        moments.append(Moment(line.status.capitalize(), None, NOW, between))
    return moments


def _time(moment: datetime, before: datetime) -> str:
    moment, before = moment.astimezone(UTC), before.astimezone(UTC)
    return f"{moment:%H:%M:%S}" if moment.date() == before.date() else f"{moment:%Y-%m-%d %H:%M:%S}"


def _between(first: datetime, second: datetime) -> float:
    return max(0.0, (second - first).total_seconds())
