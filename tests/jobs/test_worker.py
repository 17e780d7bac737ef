"""A worker's own doing with the Jobs that it takes, where the moment matters; the rest runs in `test_jobs_faults`."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
from asgiref.sync import sync_to_async

from accounts.models import ApiKey, User
from inference.models import BaseModel
from inference.worker.background import LentEngine
from jobs.models import CompletionJob
from jobs.services import request_cancel
from jobs.worker import JobRunner
from tests.jobs.conftest import assert_money, submit


class Life:
    """An engine that never comes; `on_look` is called whenever the worker asks whether it serves."""

    def __init__(self) -> None:
        self.on_look: Callable[[], object] = lambda: None

    @property
    def is_serving(self) -> bool:
        self.on_look()
        return True

    async def engine(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.django_db(transaction=True)
async def test_a_job_that_is_stopped_as_it_is_claimed_does_not_stay_behind(
    user: User, key: ApiKey, model: BaseModel
) -> None:
    job = await sync_to_async(submit)(user, key, model)
    life = Life()
    runner = JobRunner(LentEngine(model=model, life=cast("Any", life), decode=str, sequences_at_once=1))
    # The worker looks for more in the very step in which it began the Job, whose task has not run yet.
    looks = itertools.count(1)

    def stop_at_the_second() -> None:
        if next(looks) == 2:
            runner.cancel(job.request_id)

    life.on_look = stop_at_the_second

    async def until(**row: object) -> None:
        for _ in range(1000):
            if await CompletionJob.objects.filter(pk=job.pk, **row).aexists():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"the Job never had {row}")

    try:
        # Its row does not say that it is cancelled: back in line.
        await until(claims=2, status="running")
        await sync_to_async(request_cancel)(job_id=job.pk)
        runner.cancel(job.request_id)
        await until(status="cancelled")
    finally:
        await runner.finish(within=0)
    await sync_to_async(assert_money)(user, used=0)
