"""A process that changes a Harvest job and is killed before its commit: `python -m tests.harvest.child ACT ID…`.

It prints `done` inside the transaction, and sleeps there.
"""

import sys
import time
import uuid
from collections.abc import Callable

import django
from django.db import transaction

RESULT = {"manifest_key": "m", "stats_key": "s", "bytes_written": 5, "timings": {}}


def main() -> None:
    django.setup()
    from accounts.models import ApiKey
    from harvest import services
    from inference.models import BaseModel
    from tests.harvest.conftest import OWNER, plan_for

    def submit(key_id: str) -> None:
        key = ApiKey.objects.select_related("user").get(pk=key_id)
        services.submit_harvest(user=key.user, api_key=key, plan=plan_for(BaseModel.objects.get()))

    def cancel(job_id: str) -> None:
        services.cancel_harvest(job_id=uuid.UUID(job_id))

    def finish(job_id: str) -> None:
        services.finish_harvest(job_id=uuid.UUID(job_id), owner=OWNER, tokens=7, result=RESULT)

    def fail(job_id: str) -> None:
        services.fail_unavailable(job_id=uuid.UUID(job_id), error="No runner.")

    acts: dict[str, Callable[[str], None]] = {"submit": submit, "cancel": cancel, "finish": finish, "fail": fail}
    with transaction.atomic():
        acts[sys.argv[1]](sys.argv[2])
        sys.stdout.write("done\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main()
