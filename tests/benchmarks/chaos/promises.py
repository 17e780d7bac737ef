"""What has to be true once the dust of a chaos run has settled."""

import asyncio
import time
from collections import Counter
from typing import Any

import numpy as np

from tests.benchmarks.chaos.traffic import HONEST_JOB_ENDS, AskedJob, Researcher, Seen
from tests.harvest.harvests import Harvest, download
from tests.stack import Stack, StackUser

MONEY = """
from budgets.models import Hold, LedgerEntry
from budgets.selectors import imbalances
from django.db.models import Count, Sum
holds = Hold.objects.values("work_kind", "work_id").annotate(n=Count("id"), charged=Sum("charged"))
result = {
    "live": Hold.objects.filter(state="live").count(),
    "imbalances": [str(one) for one in imbalances()],
    "entries": LedgerEntry.objects.count(),
    "charged": {str(row["work_kind"]) + " " + row["work_id"]: row["charged"] or 0 for row in holds},
    "held_twice": [row["work_id"] for row in holds if row["n"] > 1],
    "by_user": dict(Hold.objects.filter(work_kind="completion").values_list("budget__user").annotate(Sum("charged"))),
    "settled": Hold.objects.filter(state="settled").count(),
}
"""


async def check_promises(
    seen: Seen,
    *,
    stack: Stack,
    researcher: Researcher,
    harvester: StackUser,
    reference: Harvest,
    seconds: float,
) -> dict[str, Any]:
    """Wait until all work has ended, check every promise, and return figures; broken ones go to `seen.faults`."""
    deadline = time.monotonic() + seconds
    ends: Counter[str] = Counter()
    for job in seen.jobs:
        ends[await _check_job(job, seen, researcher=researcher, deadline=deadline)] += 1
    harvest_ends: Counter[str] = Counter()
    for job_id in seen.harvests:
        harvest_ends[await asyncio.to_thread(_check_harvest, job_id, seen, stack, harvester, reference, deadline)] += 1
    money = await _settled_money(stack, deadline)
    _check_money(money, seen)
    return {
        "jobs": dict(ends),
        "harvests": dict(harvest_ends),
        "holds_live": money["live"],
        "ledger_rows": money["entries"],
        "tokens_charged": sum(money["charged"].values()),
    }


async def _check_job(job: AskedJob, seen: Seen, *, researcher: Researcher, deadline: float) -> str:
    while True:
        answer = await researcher.read(f"completion-jobs/{job.id}")
        now = answer.json() if answer is not None and answer.status_code == 200 else {}
        if now.get("status") in ("succeeded", "failed", "cancelled"):
            break
        if time.monotonic() > deadline:
            seen.faults.append(f"Job {job.id} never ended: {now.get('status')}")
            return "unfinished"
        await asyncio.sleep(0.3)
    status = str(now["status"])
    if status == "cancelled" and not job.is_cancelled:
        seen.faults.append(f"Job {job.id} was cancelled by nobody")
    if status == "cancelled":
        return status
    result = await researcher._clients[0].get(f"completion-jobs/{job.id}/result")
    if status == "succeeded":
        body = result.json()
        given = (result.status_code, body["choices"][0]["text"], body["usage"]["total_tokens"])
        if given != (200, job.question.text, job.question.tokens):
            seen.faults.append(f"Job {job.id} succeeded with a wrong result: {given}")
        return status
    code = result.json()["error"]["code"]
    if code not in HONEST_JOB_ENDS:
        seen.faults.append(f"Job {job.id} failed with {result.status_code} {code}")
    return f"failed: {code}"


def _check_harvest(job_id: str, seen: Seen, stack: Stack, user: StackUser, reference: Harvest, deadline: float) -> str:
    with stack.client(user) as client:
        while (job := client.get(f"harvest/{job_id}", params={"wait": 5}).json()).get("status") not in (
            *("done", "failed", "cancelled"),
        ):
            if time.monotonic() > deadline:
                seen.faults.append(f"Harvest job {job_id} never ended: {job.get('status')}")
                return "unfinished"
    if job["status"] != "done":
        return f"{job['status']}: {job.get('error')}"
    harvest = download(job)
    if harvest.ids != reference.ids or harvest.job["tokens"] != reference.job["tokens"]:
        seen.faults.append(f"Harvest job {job_id} read other tokens than an undisturbed run")
    elif not all(
        np.allclose(harvest.values[index], values, rtol=1e-5, atol=1e-5) for index, values in reference.values.items()
    ):
        seen.faults.append(f"Harvest job {job_id} has other activations than an undisturbed run")
    elif not all(
        np.allclose(harvest.stats[name], values, rtol=1e-5, atol=1e-5) for name, values in reference.stats.items()
    ):
        seen.faults.append(f"Harvest job {job_id} has other statistics than an undisturbed run")
    return "done"


async def _settled_money(stack: Stack, deadline: float) -> dict[str, Any]:
    # Its connections are from before PostgreSQL was killed.
    await asyncio.to_thread(stack.end_console)
    while True:
        money: dict[str, Any] = await asyncio.to_thread(stack.django, MONEY)
        if money["live"] == 0 or time.monotonic() > deadline:
            return money
        await asyncio.sleep(1)


def _check_money(money: dict[str, Any], seen: Seen) -> None:
    if money["live"]:
        seen.faults.append(f"{money['live']} Holds are still live")
    seen.faults += [f"the ledger does not add up: {one}" for one in money["imbalances"]]
    seen.faults += [f"work {work_id} was held for twice" for work_id in money["held_twice"]]
    if money["entries"] != money["settled"]:
        seen.faults.append(f"{money['settled']} settled Holds have {money['entries']} rows in the ledger")
    for user, tokens in seen.whole.items():
        charged = money["by_user"].get(str(user), 0)
        if charged < tokens:
            seen.faults.append(f"User {user} got {tokens} tokens in whole answers and was charged {charged}")
    for one in seen.refused:
        # None: it was no answer to this very request, but one kept for its key.
        charged = money["charged"].get(f"completion {one.request_id}")
        if charged != 0:
            seen.faults.append(
                f"key {one.key} was answered {one.status} with {charged} tokens charged and then otherwise, {one.then}"
            )
    charged_jobs = {name.split()[1]: charged for name, charged in money["charged"].items() if name.startswith("job ")}
    for job in seen.jobs:
        charged = charged_jobs.get(job.id, 0)
        if charged > job.question.tokens:
            seen.faults.append(f"Job {job.id} was charged {charged} tokens for {job.question.tokens}")
