"""What the money refuses."""

from datetime import datetime

from acsinfra.core.errors import ApiError, ErrorCode
from acsinfra.core.times import iso_utc_ms


class BudgetExceeded(ApiError):
    """`429 budget_exceeded`: the tokens do not fit. Clients are told not to retry: only a new month makes room."""

    def __init__(self, *, tokens: int, remaining: int, is_of_key: bool, month_ends: datetime) -> None:
        self.tokens, self.remaining, self.is_of_key, self.month_ends = tokens, remaining, is_of_key, month_ends
        whose = "under the cap of this API key" if is_of_key else "of your Budget"
        super().__init__(
            ErrorCode.BUDGET_EXCEEDED,
            f"This needs {tokens:,} tokens, and {remaining:,} {whose} are left until the month ends, "
            f"at {iso_utc_ms(month_ends)}.",
            headers={"x-should-retry": "false"},
        )


class HoldConflict(Exception):
    """The work has a Hold already, which is not the one asked for: charged before, of another User, or other tokens."""
