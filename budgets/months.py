"""Calendar months in UTC."""

from datetime import UTC, date, datetime


def month_of(moment: datetime) -> date:
    """The first day of the month of `moment` (aware)."""
    return moment.astimezone(UTC).date().replace(day=1)


def month_start(month: date) -> datetime:
    """The moment at which `month` (its first day) begins."""
    return datetime(month.year, month.month, 1, tzinfo=UTC)


def month_end(month: date) -> datetime:
    """The moment at which `month` (its first day) ends and the next begins."""
    return datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)
