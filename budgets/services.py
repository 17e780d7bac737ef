"""What changes the money: Holds taken, settled, released and swept.

Each of the three steps is one SQL statement (`budgets.statements`). The sync functions run inside the caller's
`transaction.atomic()`, so that the end of a Job and its settlement are one transaction; the `_async` ones on the async
pool, each committed at its return. All are safe to repeat.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import structlog
from django.conf import settings
from django.utils import timezone

from accounts.models import ApiKey, User
from acsinfra.core.errors import invalid_api_key
from acsinfra.core.ids import new_uuid7
from budgets import statements
from budgets.errors import BudgetExceeded, HoldConflict
from budgets.execution import Row, Step, run, run_async
from budgets.models import Hold, WorkKind
from budgets.months import month_end, month_of

logger = structlog.get_logger(__name__)

# Past any real request; keeps sums of tokens far from the end of 64 bits.
MAX_TOKENS: Final = 10**15
# Looks at a Budget that has room, yet whose take failed: others moved it in between.
TAKE_TRIES: Final = 10
SWEEP_BATCH: Final = 500


@dataclass(frozen=True)
class WorkRef:
    """The work that a Hold is for: its kind, its id (of a request or a Job), its model, and who answers for it.

    `holder` (the id of an API process, say) lets a sweep end the Holds of a process that died; a Job needs none.
    """

    kind: WorkKind
    id: str
    holder: str = ""
    model: str = ""


@dataclass(frozen=True)
class HoldEnd:
    """How a Hold ended. `changed` is False where it had ended before (or is gone): then nothing changed.

    `state` and `charged` (tokens) say how it ended, by this call or before; `state` is None for a Hold that is gone.
    """

    changed: bool
    state: Hold.State | None
    charged: int


@dataclass(frozen=True)
class SweepCount:
    """What a sweep ended: Holds settled and released, and the tokens it charged."""

    settled: int = 0
    released: int = 0
    tokens: int = 0


# Taking


def take_hold(
    *,
    user: User,
    api_key: ApiKey | None,
    tokens: int,
    work: WorkRef,
    expires_at: datetime | None = None,
    now: datetime | None = None,
) -> Hold:
    """Set `tokens` aside for `work`, in the User's Budget of this month and under the key's cap.

    One statement decides (used + held + tokens <= limit), so that requests on any number of servers cannot overspend;
    a CHECK stands behind it. Asked again for the same work, it gives the live Hold that is there already, whatever
    its month. `expires_at` is when `end_expired_holds` may end it.

    Raises BudgetExceeded (`429 budget_exceeded`), HoldConflict (the work was charged already, or holds something
    else), and ApiError `401` when the key or the User has been deleted meanwhile.
    """
    return run(_take(user, api_key, tokens, work, expires_at, now, new_uuid7()))


async def take_hold_async(
    *,
    user: User,
    api_key: ApiKey | None,
    tokens: int,
    work: WorkRef,
    expires_at: datetime | None = None,
    now: datetime | None = None,
) -> Hold:
    """`take_hold` from an async view: one statement on the async pool, committed when this returns.

    A request that is cancelled while its Hold is on the way has none in the end.
    """
    hold_id = new_uuid7()
    taking = asyncio.ensure_future(run_async(_take(user, api_key, tokens, work, expires_at, now, hold_id)))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        await _has_ended(taking)
        await run_async(_end(hold_id, None, now))
        raise


def check_room(*, user: User, api_key: ApiKey | None, tokens: int, now: datetime | None = None) -> None:
    """Raise BudgetExceeded if a Hold of `tokens` would not fit now. Takes nothing: a Job holds when it runs."""
    run(require_room(room_values(user=user, api_key=api_key, tokens=tokens, now=now)))


def room_values(*, user: User, api_key: ApiKey | None, tokens: int, now: datetime | None = None) -> dict[str, Any]:
    """What `statements.ROOM` (without a key) or `ROOM_WITH_KEY` is asked with, and `require_room`."""
    return _values(user, api_key, tokens, None, now)


def require_room(values: dict[str, Any]) -> Step[None]:
    """`check_room` as a step; it makes the month's rows at the first use. Raises ApiError `401` as `take_hold`."""
    found = yield from _look(values)
    found.require_room(values)


def _take(
    user: User,
    api_key: ApiKey | None,
    tokens: int,
    work: WorkRef,
    expires_at: datetime | None,
    now: datetime | None,
    hold_id: uuid.UUID,
) -> Step[Hold]:
    if work.kind == WorkKind.APP and api_key is not None:
        raise ValueError("work of the App has no key")
    values = _values(user, api_key, tokens, work, now)
    values |= {"id": hold_id, "holder": work.holder, "expires_at": expires_at}
    take = statements.TAKE if api_key is None else statements.TAKE_WITH_KEY
    row = yield ((take, values),)
    tries = 0
    while row is None:
        tries += 1
        found = yield from _look(values)
        if found.hold is not None:
            return _the_same(found, values)
        found.require_room(values, at_last=tries == TAKE_TRIES)
        row = yield ((take, values),)
    return _hold_of(row)


def _values(
    user: User, api_key: ApiKey | None, tokens: int, work: WorkRef | None, now: datetime | None
) -> dict[str, Any]:
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"a Hold is of 0 to {MAX_TOKENS:,} tokens, not {tokens}")
    if api_key is not None and api_key.user_id != user.pk:
        raise ValueError("the key is another User's")
    moment = now or timezone.now()
    return {
        "user": user.pk,
        "api_key": None if api_key is None else api_key.pk,
        "tokens": tokens,
        "work_kind": None if work is None else WorkKind(work.kind).value,
        "work_id": None if work is None else work.id,
        "model": "" if work is None else work.model,
        "now": moment,
        "month": month_of(moment),
        "default_limit": settings.MONTHLY_TOKENS,
    }


@dataclass(frozen=True)
class _Found:
    """What stands where a Hold is to be taken: what is left, and the work's own Hold."""

    has_rows: bool
    left_of_budget: int
    left_of_key: int | None
    hold: Hold | None
    hold_user_id: int | None

    def require_room(self, values: dict[str, Any], *, at_last: bool = False) -> None:
        """Raise BudgetExceeded if the tokens do not fit; `at_last`, even if they would fit right now."""
        needed = values["tokens"]
        left, is_of_key = self.left_of_budget, False
        if self.left_of_key is not None and self.left_of_key < left:
            left, is_of_key = self.left_of_key, True
        if needed > left or at_last:
            raise BudgetExceeded(
                tokens=needed, remaining=max(left, 0), is_of_key=is_of_key, month_ends=month_end(values["month"])
            )


def _look(values: dict[str, Any]) -> Step[_Found]:
    """The figures, making the month's rows at the first use. Raises ApiError 401: the key or the User is gone."""
    found = _found((yield ((statements.LOOK, values),)), values)
    if not found.has_rows and found.hold is None:
        locks = [(statements.LOCK_USER, values)]
        rows = [(statements.OPEN_BUDGET, values)]
        if values["api_key"] is not None:
            locks.append((statements.LOCK_KEY, values))
            rows.append((statements.OPEN_KEY_USE, values))
        found = _found((yield (*locks, *rows, (statements.LOOK, values))), values)
        if not found.has_rows:
            raise invalid_api_key()
    return found


def _found(row: Row | None, values: dict[str, Any]) -> _Found:
    assert row is not None
    limit, used, held, has_key, cap, key_used, key_held, *columns, hold_user_id = row
    return _Found(
        has_rows=limit is not None and (has_key or values["api_key"] is None),
        left_of_budget=0 if limit is None else limit - used - held,
        left_of_key=None if cap is None else cap - key_used - key_held,
        hold=None if columns[0] is None else _hold_of(columns),
        hold_user_id=hold_user_id,
    )


def _the_same(found: _Found, values: dict[str, Any]) -> Hold:
    hold = found.hold
    assert hold is not None
    if hold.state != Hold.State.LIVE:
        raise HoldConflict(f"{hold.work_kind} {hold.work_id} was charged {hold.charged} tokens already")
    if found.hold_user_id != values["user"] or hold.tokens != values["tokens"]:
        raise HoldConflict(f"{hold.work_kind} {hold.work_id} holds {hold.tokens} tokens already")
    return hold


def _hold_of(row: Sequence[Any]) -> Hold:
    return Hold.from_db("default", statements.HOLD_COLUMNS, row)


# Ending


def settle_hold(*, hold: Hold | uuid.UUID, tokens: int, now: datetime | None = None) -> HoldEnd:
    """Charge `tokens`, as the engine counted them and never more than the Hold, and let go of the rest.

    The charge goes into the month in which the Hold was taken, and has its row in the ledger. A Hold that has ended
    stays as it is; the answer says so.
    """
    return run(_end(hold, tokens, now))


async def settle_hold_async(*, hold: Hold | uuid.UUID, tokens: int, now: datetime | None = None) -> HoldEnd:
    """`settle_hold` from an async view: one statement on the async pool, sent also if the caller is cancelled."""
    return await _end_though_cancelled(_end(hold, tokens, now))


def release_hold(*, hold: Hold | uuid.UUID, now: datetime | None = None) -> HoldEnd:
    """Let go of the Hold and charge nothing. A Hold that has ended stays as it is; the answer says so."""
    return run(_end(hold, None, now))


async def release_hold_async(*, hold: Hold | uuid.UUID, now: datetime | None = None) -> HoldEnd:
    """`release_hold` from an async view: one statement on the async pool, sent also if the caller is cancelled."""
    return await _end_though_cancelled(_end(hold, None, now))


async def _end_though_cancelled(step: Step[HoldEnd]) -> HoldEnd:
    ending = asyncio.ensure_future(run_async(step))
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        await _has_ended(ending)
        raise


def _end(hold: Hold | uuid.UUID, tokens: int | None, now: datetime | None) -> Step[HoldEnd]:
    if tokens is not None and tokens < 0:
        raise ValueError(f"a charge is of 0 or more tokens, not {tokens}")
    hold_id = hold.pk if isinstance(hold, Hold) else hold
    counted = None if tokens is None else min(tokens, MAX_TOKENS)
    values = {"id": hold_id, "tokens": counted, "now": now or timezone.now()}
    row = yield ((statements.RELEASE if tokens is None else statements.SETTLE, values),)
    if row is not None:
        held, charged = row
        if tokens is not None and tokens > held:
            logger.warning("counted more than was held", hold_id=str(hold_id), held=held, counted=tokens)
        state = Hold.State.RELEASED if tokens is None else Hold.State.SETTLED
        return HoldEnd(changed=True, state=state, charged=charged)
    ended = yield ((statements.STATE, values),)
    if ended is None:
        return HoldEnd(changed=False, state=None, charged=0)
    return HoldEnd(changed=False, state=Hold.State(ended[0]), charged=ended[1] or 0)


async def _has_ended(task: asyncio.Future[Any]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # seen: the caller went away, and asyncio need not complain of it


# Sweeping

type Count = Callable[[Hold], int | None]


def end_orphaned_holds(
    *,
    kind: WorkKind,
    find_living: Callable[[Sequence[Hold]], Collection[uuid.UUID]],
    taken_before: datetime,
    count: Count | None = None,
    now: datetime | None = None,
) -> SweepCount:
    """End the live Holds of `kind` whose work no longer exists.

    `find_living` gets up to 500 Holds at a time and returns the ids of those whose work (or whose holder) lives.
    `count` says what an orphan is charged: the tokens that were counted last, or None to release it, as without it.
    Holds taken since `taken_before` are left alone: their work may not be written yet. Safe to run twice at once.
    """
    total = SweepCount()
    after = uuid.UUID(int=0)
    live = Hold.objects.filter(state=Hold.State.LIVE, work_kind=kind, taken_at__lt=taken_before).order_by("id")
    while batch := list(live.filter(id__gt=after)[:SWEEP_BATCH]):
        after = batch[-1].pk
        living = frozenset(find_living(batch))
        total = _end_all([hold for hold in batch if hold.pk not in living], count, now, total)
    return total


def end_expired_holds(
    *, kinds: Collection[WorkKind], count: Count | None = None, now: datetime | None = None
) -> SweepCount:
    """End the live Holds of `kinds` whose `expires_at` has passed, as `end_orphaned_holds` does.

    Safe to run twice at once.
    """
    total = SweepCount()
    moment = now or timezone.now()
    expired = Hold.objects.filter(state=Hold.State.LIVE, work_kind__in=kinds, expires_at__lt=moment).order_by(
        "expires_at"
    )
    while batch := list(expired[:SWEEP_BATCH]):
        total = _end_all(batch, count, now, total)
    return total


def _end_all(orphans: Sequence[Hold], count: Count | None, now: datetime | None, total: SweepCount) -> SweepCount:
    settled, released, tokens = total.settled, total.released, total.tokens
    for hold in orphans:
        counted = count(hold) if count is not None else None
        end = run(_end(hold, counted, now))
        if not end.changed:
            continue
        settled += counted is not None
        released += counted is None
        tokens += end.charged
        logger.info("ended an orphaned hold", hold_id=str(hold.pk), kind=hold.work_kind, charged=end.charged)
    return SweepCount(settled=settled, released=released, tokens=tokens)
