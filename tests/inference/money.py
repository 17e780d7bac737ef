"""What a stack's database says of the money of one User."""

import time
from dataclasses import dataclass

from tests.stack import Stack, StackUser

_LOOK = """
from budgets.models import Hold
from budgets.selectors import imbalances
holds = Hold.objects.filter(budget__user_id=user).order_by("id")
result = {
    "held": [hold.tokens for hold in holds if hold.state == "live"],
    "released": [hold.tokens for hold in holds if hold.state == "released"],
    "charged": [hold.charged for hold in holds if hold.state == "settled"],
    "imbalances": [str(imbalance) for imbalance in imbalances()],
}
"""
_LIMIT = """
from accounts.models import ApiKey, User
from budgets.limits import set_key_cap, set_monthly_tokens
set_monthly_tokens(user=User.objects.get(pk=user), monthly_tokens=tokens)
set_key_cap(api_key=ApiKey.objects.get(pk=key), token_cap=cap)
"""
_SWEEP = """
from datetime import timedelta
from inference.charges import sweep_charges
swept = [sweep_charges(missing_for=timedelta(seconds=missing_for)) for _ in range(2)]
result = [[holds.settled, holds.released, keys.answered, keys.freed] for holds, keys in swept]
"""


@dataclass(frozen=True)
class Money:
    """A User's Holds: the tokens of the live and the released ones, and what the settled ones were charged."""

    held: list[int]
    released: list[int]
    charged: list[int]
    imbalances: list[str]


def money_of(stack: Stack, user: StackUser, *, is_final: bool = True, seconds: float = 30.0) -> Money:
    """Return the User's Holds, once none is live where `is_final`; everything in the database must add up."""
    deadline = time.monotonic() + seconds
    while True:
        money = Money(**stack.django(_LOOK, user=user.id))
        assert money.imbalances == []
        if not is_final or not money.held:
            return money
        assert time.monotonic() < deadline, f"Holds of {money.held} tokens still live after {seconds} s"
        time.sleep(0.05)


def set_limits(stack: Stack, user: StackUser, *, tokens: int, cap: int | None = None) -> None:
    """Set the User's Budget, and the cap of their key."""
    stack.django(_LIMIT, user=user.id, key=user.key_id, tokens=tokens, cap=cap)


def sweep(stack: Stack, *, missing_for: float = 0) -> list[list[int]]:
    """Sweep twice, for processes that have been missing for so many seconds.

    Returns how many Holds each settled and released, and how many keys it answered and freed.
    """
    swept: list[list[int]] = stack.django(_SWEEP, missing_for=missing_for)
    return swept
