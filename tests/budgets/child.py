"""A process of its own that takes Holds, for tests that kill it or run several: `python -m tests.budgets.child`.

It prints `ready`, waits for a line on its input, does what its arguments say and prints what came of it as JSON.
"""

import asyncio
import json
import sys
import threading
import time

import django
from django.db import connection, transaction


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    django.setup()
    from accounts.models import ApiKey, User

    what, key_id, tokens, n_at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    key = ApiKey.objects.select_related("user").get(pk=key_id)
    user: User = key.user
    connection.close()
    say("ready")
    sys.stdin.readline()
    if what == "async":
        say(json.dumps(asyncio.run(_take_async(user, key, tokens, n_at_once))))
    elif what == "threads":
        say(json.dumps(_take_in_threads(user, key, tokens, n_at_once)))
    else:
        _take_and_wait(user, key, tokens, is_committed=what == "committed")


async def _take_async(user: object, key: object, tokens: int, n_at_once: int) -> list[str]:
    from acsinfra.core.db import close_async_pool
    from budgets.errors import BudgetExceeded
    from budgets.services import take_hold_async
    from tests.budgets.people import new_work

    async def take() -> str | None:
        try:
            hold = await take_hold_async(user=user, api_key=key, tokens=tokens, work=new_work())  # type: ignore[arg-type]
        except BudgetExceeded:
            return None
        return str(hold.pk)

    taken = await asyncio.gather(*(take() for _ in range(n_at_once)))
    await close_async_pool()
    return [hold_id for hold_id in taken if hold_id]


def _take_in_threads(user: object, key: object, tokens: int, n_at_once: int) -> list[str]:
    from acsinfra.core.db import _take_connection
    from budgets.errors import BudgetExceeded
    from budgets.services import take_hold
    from tests.budgets.people import new_work

    taken: list[str] = []
    barrier = threading.Barrier(n_at_once)

    def take() -> None:
        barrier.wait()
        try:
            # As the API's steps do: so many take turns at 8 connections, for as long as a busy machine needs.
            _take_connection()
            hold = take_hold(user=user, api_key=key, tokens=tokens, work=new_work())  # type: ignore[arg-type]
        except BudgetExceeded:
            return
        finally:
            connection.close()
        taken.append(str(hold.pk))

    threads = [threading.Thread(target=take) for _ in range(n_at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _take_and_wait(user: object, key: object, tokens: int, *, is_committed: bool) -> None:
    """Hold, and sleep until the process is killed: after the commit, or inside the transaction."""
    from budgets.services import take_hold
    from tests.budgets.people import new_work

    work = new_work(holder="api-killed")
    if is_committed:
        hold = take_hold(user=user, api_key=key, tokens=tokens, work=work)  # type: ignore[arg-type]
        say(json.dumps(str(hold.pk)))
        time.sleep(600)
    with transaction.atomic():
        hold = take_hold(user=user, api_key=key, tokens=tokens, work=work)  # type: ignore[arg-type]
        say(json.dumps(str(hold.pk)))
        time.sleep(600)


if __name__ == "__main__":
    main()
