"""Times as the API writes them."""

from datetime import UTC, datetime


def iso_utc_ms(moment: datetime) -> str:
    """`moment` (aware) in UTC with milliseconds and an offset: `2026-11-03T09:30:00.123+00:00`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")
