"""The money against a model of it: whatever happens in whatever order, every figure is the model's after every step."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from accounts.models import ApiKey, User
from acsinfra.core.db import close_async_pool
from budgets.errors import BudgetExceeded, HoldConflict
from budgets.limits import apply_limits, set_key_cap, set_monthly_tokens
from budgets.models import Hold, WorkKind
from budgets.months import month_end, month_of
from budgets.selectors import budget_summary, imbalances
from budgets.services import (
    HoldEnd,
    WorkRef,
    end_expired_holds,
    end_orphaned_holds,
    release_hold,
    release_hold_async,
    settle_hold,
    settle_hold_async,
    take_hold,
    take_hold_async,
)
from tests.budgets.people import make_key, make_user, new_work

START = datetime(2026, 11, 15, 12, tzinfo=UTC)
DEAD = "api-dead"
EVERY_FIGURE = """
SELECT 'budget', user_id::text, month, token_limit, ceiling, used, held FROM budgets_budget
UNION ALL
SELECT 'key', k.api_key_id::text, b.month, k.cap, k.ceiling, k.used, k.held
  FROM budgets_keyuse k JOIN budgets_budget b ON b.id = k.budget_id
UNION ALL
SELECT h.state, h.id::text, NULL, h.tokens, NULL, h.charged, l.tokens
  FROM budgets_hold h LEFT JOIN budgets_ledgerentry l ON l.hold_id = h.id
"""

who = st.integers(0, 3)
amounts = st.one_of(st.integers(0, 60), st.integers(0, 400))
limits = st.one_of(st.none(), st.integers(0, 300))
flags = st.booleans()


@dataclass
class ModelPot:
    """A month's tokens of a User, or of a key (whose limit may be None)."""

    limit: int | None
    used: int = 0
    held: int = 0
    ceiling: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.ceiling = self.limit

    @property
    def room(self) -> int:
        return 10**18 if self.limit is None else self.limit - self.used - self.held

    def hold(self, tokens: int) -> None:
        self.held += tokens
        self.ceiling = self.limit

    def set_limit(self, limit: int | None) -> None:
        if limit != self.limit:
            self.limit = limit
            self.ceiling = None if limit is None else max(limit, self.used + self.held)

    @property
    def figures(self) -> tuple[int | None, ...]:
        return self.limit, self.ceiling, self.used, self.held


@dataclass
class ModelHold:
    """A Hold as the model knows it, with the pots that it is in."""

    id: UUID
    number: int
    work: WorkRef
    tokens: int
    pots: list[ModelPot]
    expires_at: datetime
    state: str = "live"
    charged: int | None = None

    def end(self, counted: int | None) -> None:
        assert self.state == "live"
        self.state = "released" if counted is None else "settled"
        self.charged = None if counted is None else min(counted, self.tokens)
        for pot in self.pots:
            pot.held -= self.tokens
            pot.used += self.charged or 0


class Money(RuleBasedStateMachine):
    """Two Users; the first has a key under a cap and one without, the second a key, and the App none."""

    loop: ClassVar[asyncio.Runner]
    n_steps: ClassVar[int] = 0
    default_limit: ClassVar[int] = 250

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.users = [make_user(), make_user(monthly_tokens=150)]
        self.limits: list[int | None] = [None, 150]
        self.caps: list[int | None] = [100, None, None, None]
        self.keys = [make_key(self.users[0], cap=100), make_key(self.users[0]), make_key(self.users[1]), None]
        self.pots: dict[tuple[int, Any], ModelPot] = {}
        self.key_pots: dict[tuple[int, Any], ModelPot] = {}
        self.holds: list[ModelHold] = []

    def teardown(self) -> None:
        User.objects.filter(pk__in=[user.pk for user in self.users]).delete()

    # What the rules share

    def owner(self, number: int) -> tuple[User, ApiKey | None]:
        key = self.keys[number]
        return (self.users[1] if key is None or key.user_id == self.users[1].pk else self.users[0]), key

    def model_pots(self, number: int) -> list[ModelPot]:
        """The pots of the present month, made as the first look makes them."""
        user, key = self.owner(number)
        user_number, month = self.users.index(user), month_of(self.now)
        limit = self.limits[user_number]
        pots = [self.pots.setdefault((user_number, month), ModelPot(self.default_limit if limit is None else limit))]
        if key is not None:
            pots.append(self.key_pots.setdefault((number, month), ModelPot(self.caps[number])))
        return pots

    def await_(self, awaitable: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await awaitable

        return self.loop.run(run())

    def take(self, number: int, tokens: int, work: WorkRef, expires_at: datetime, *, is_async: bool) -> Hold:
        user, key = self.owner(number)
        if is_async:
            taken = take_hold_async(
                user=user, api_key=key, tokens=tokens, work=work, expires_at=expires_at, now=self.now
            )
            hold: Hold = self.await_(taken)
            return hold
        return take_hold(user=user, api_key=key, tokens=tokens, work=work, expires_at=expires_at, now=self.now)

    def new_work(self, number: int, holder: str = "") -> WorkRef:
        return new_work(WorkKind.APP if self.keys[number] is None else WorkKind.COMPLETION, holder)

    def keep(self, hold: Hold, number: int, work: WorkRef, pots: list[ModelPot], expires_at: datetime) -> None:
        for pot in pots:
            pot.hold(hold.tokens)
        self.holds.append(ModelHold(hold.pk, number, work, hold.tokens, pots, expires_at))

    # Rules

    @rule(number=who, tokens=amounts, minutes=st.integers(1, 100_000), is_orphan=flags, is_async=flags)
    def submit(self, number: int, tokens: int, minutes: int, is_orphan: bool, is_async: bool) -> None:
        pots = self.model_pots(number)
        work = self.new_work(number, DEAD if is_orphan else "api-1")
        expires_at = self.now + timedelta(minutes=minutes)
        room = min(pot.room for pot in pots)
        if tokens <= room:
            self.keep(self.take(number, tokens, work, expires_at, is_async=is_async), number, work, pots, expires_at)
            return
        with pytest.raises(BudgetExceeded) as refused:
            self.take(number, tokens, work, expires_at, is_async=is_async)
        assert refused.value.remaining == max(0, room)
        assert refused.value.month_ends == month_end(month_of(self.now))

    @rule(number=who, tokens=st.integers(1, 100), n_at_once=st.integers(2, 12))
    def submit_many_at_once(self, number: int, tokens: int, n_at_once: int) -> None:
        pots = self.model_pots(number)
        user, key = self.owner(number)
        works = [self.new_work(number) for _ in range(n_at_once)]
        expires_at = self.now + timedelta(days=1)

        async def submit_all() -> list[Hold | BaseException]:
            takes = [
                take_hold_async(user=user, api_key=key, tokens=tokens, work=work, expires_at=expires_at, now=self.now)
                for work in works
            ]
            return await asyncio.gather(*takes, return_exceptions=True)

        n_fit = max(0, min(n_at_once, *(pot.room // tokens for pot in pots)))
        answers = self.loop.run(submit_all())
        assert sum(isinstance(answer, Hold) for answer in answers) == n_fit
        for work, answer in zip(works, answers, strict=True):
            if isinstance(answer, Hold):
                self.keep(answer, number, work, pots, expires_at)
            else:
                assert isinstance(answer, BudgetExceeded), answer

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), is_async=flags)
    def submit_the_same_work_again(self, data: st.DataObject, is_async: bool) -> None:
        known = data.draw(st.sampled_from(self.holds))
        if known.state == "released":
            return
        if known.state == "live":
            again = self.take(known.number, known.tokens, known.work, known.expires_at, is_async=is_async)
            assert again.pk == known.id
        else:
            with pytest.raises(HoldConflict):
                self.take(known.number, known.tokens, known.work, known.expires_at, is_async=is_async)
        # Asking opened nothing: a work that has its Hold needs no row of this month.

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), counted=st.one_of(st.none(), amounts), is_async=flags)
    def end(self, data: st.DataObject, counted: int | None, is_async: bool) -> None:
        known = data.draw(st.sampled_from(self.holds))
        if counted is None:
            ended = self.await_(release_hold_async(hold=known.id)) if is_async else release_hold(hold=known.id)
        elif is_async:
            ended = self.await_(settle_hold_async(hold=known.id, tokens=counted, now=self.now))
        else:
            ended = settle_hold(hold=known.id, tokens=counted, now=self.now)
        was_live = known.state == "live"
        if was_live:
            known.end(counted)
        assert (ended.changed, ended.state, ended.charged) == (was_live, known.state, known.charged or 0)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), counted=st.one_of(st.none(), amounts))
    def end_twice_at_once(self, data: st.DataObject, counted: int | None) -> None:
        """Both ends are the same, so that a run can be drawn again; test_races has cancel against finish."""
        known = data.draw(st.sampled_from(self.holds))

        async def end() -> HoldEnd:
            if counted is None:
                return await release_hold_async(hold=known.id, now=self.now)
            return await settle_hold_async(hold=known.id, tokens=counted, now=self.now)

        async def race() -> list[HoldEnd]:
            return [*await asyncio.gather(end(), end())]

        ends = self.loop.run(race())
        assert sum(ended.changed for ended in ends) == (known.state == "live")
        if known.state == "live":
            known.end(counted)
        assert [(ended.state, ended.charged) for ended in ends] == [(known.state, known.charged or 0)] * 2

    @precondition(lambda self: self.holds)
    @rule(number=who, tokens=st.integers(0, 20), data=st.data())
    def transaction_that_fails(self, number: int, tokens: int, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.holds))
        self.open_months_rows(number)
        with transaction.atomic():
            try:
                self.take(number, tokens, self.new_work(number), self.now, is_async=False)
            except BudgetExceeded:
                assert tokens > min(pot.room for pot in self.model_pots(number))
            settle_hold(hold=known.id, tokens=5)
            transaction.set_rollback(True)

    def open_months_rows(self, number: int) -> None:
        pots = self.model_pots(number)
        if min(pot.room for pot in pots) >= 0:
            work, expires_at = self.new_work(number), self.now + timedelta(days=1)
            self.keep(self.take(number, 0, work, expires_at, is_async=False), number, work, pots, expires_at)
        else:
            with pytest.raises(BudgetExceeded):
                self.take(number, 0, self.new_work(number), self.now, is_async=False)

    @rule(charge=flags)
    def sweep_what_a_dead_process_held(self, charge: bool) -> None:
        orphans = [known for known in self.holds if known.state == "live" and known.work.holder == DEAD]
        count = end_orphaned_holds(
            kind=WorkKind.COMPLETION,
            find_living=lambda holds: {hold.pk for hold in holds if hold.holder != DEAD},
            taken_before=self.now + timedelta(seconds=1),
            count=(lambda hold: 7) if charge else None,
            now=self.now,
        )
        completions = [known for known in orphans if known.work.kind == WorkKind.COMPLETION]
        for known in completions:
            known.end(7 if charge else None)
        assert count.settled + count.released == len(completions)
        assert count.tokens == sum(known.charged or 0 for known in completions)

    @rule()
    def sweep_what_expired(self) -> None:
        expired = [known for known in self.holds if known.state == "live" and known.expires_at < self.now]
        count = end_expired_holds(kinds=WorkKind, now=self.now)
        for known in expired:
            known.end(None)
        assert (count.settled, count.released) == (0, len(expired))

    @rule(hours=st.integers(1, 24 * 40))
    def time_passes(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule(number=st.integers(0, 1), tokens=limits)
    def set_the_limit(self, number: int, tokens: int | None) -> None:
        set_monthly_tokens(user=self.users[number], monthly_tokens=tokens, now=self.now)
        self.limits[number] = tokens
        if pot := self.pots.get((number, month_of(self.now))):
            pot.set_limit(self.default_limit if tokens is None else tokens)

    @rule(number=st.integers(0, 2), cap=limits, by_the_admin=flags)
    def set_the_cap(self, number: int, cap: int | None, by_the_admin: bool) -> None:
        key = self.keys[number]
        assert key is not None
        if by_the_admin:
            ApiKey.objects.filter(pk=key.pk).update(token_cap=cap)
            apply_limits(now=self.now)
        else:
            set_key_cap(api_key=key, token_cap=cap, now=self.now)
        self.caps[number] = cap
        if pot := self.key_pots.get((number, month_of(self.now))):
            pot.set_limit(cap)

    # After every step

    @invariant()
    def every_figure_is_the_models(self) -> None:
        type(self).n_steps += 1
        with connection.cursor() as cursor:
            cursor.execute(EVERY_FIGURE)
            found = set(cursor.fetchall())
        keys = [None if key is None else key.pk for key in self.keys]
        expected: set[tuple[Any, ...]] = {
            ("budget", str(self.users[number].pk), month, *pot.figures) for (number, month), pot in self.pots.items()
        }
        expected |= {("key", str(keys[number]), month, *pot.figures) for (number, month), pot in self.key_pots.items()}
        expected |= {
            (known.state, str(known.id), None, known.tokens, None, known.charged, known.charged) for known in self.holds
        }
        assert found == expected
        for pot in [*self.pots.values(), *self.key_pots.values()]:
            assert pot.ceiling is None or pot.used + pot.held <= pot.ceiling

    @invariant()
    def the_ledger_and_the_live_holds_add_up(self) -> None:
        assert imbalances() == []

    @invariant()
    def the_summary_says_the_same(self) -> None:
        number = self.n_steps % 2
        pot = self.pots.get((number, month_of(self.now)))
        own = self.limits[number]
        limit = self.default_limit if own is None else own
        summary = budget_summary(self.users[number], now=self.now)
        assert (summary.limit, summary.used, summary.held) == (
            (limit, 0, 0) if pot is None else (pot.limit, pot.used, pot.held)
        )
        assert summary.remaining == max(0, summary.limit - summary.used - summary.held)


@pytest.fixture
def machine(transactional_db: None, settings: Any) -> Iterator[type[Money]]:
    settings.MONTHLY_TOKENS = Money.default_limit
    Money.n_steps = 0
    with asyncio.Runner() as Money.loop:
        yield Money
        Money.loop.run(close_async_pool())


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_the_money_follows_its_model(machine: type[Money]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=QUIET),
    )
    assert machine.n_steps >= 600


@pytest.mark.long
def test_the_money_follows_its_model_for_long(machine: type[Money], record_property: Any) -> None:
    """For `MONEY_MINUTES` (15). Each round draws anew; a failing one is shrunk and remembered by hypothesis."""
    ends = time.monotonic() + 60 * float(os.environ.get("MONEY_MINUTES", "15"))
    n_rounds = 0
    while time.monotonic() < ends:
        n_rounds += 1
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=50, stateful_step_count=100, deadline=None, suppress_health_check=QUIET),
        )
    sys.stdout.write(f"{machine.n_steps} steps in {n_rounds} rounds\n")
    record_property("steps", machine.n_steps)
    assert machine.n_steps > 0
