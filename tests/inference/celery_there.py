"""A Celery worker as Celery makes it: writes each envelope that it is given as one line of JSON."""

import json
import os
import sys
from typing import Any

from celery import Celery

from inference.bus.envelope import TASK

app = Celery("there", broker=os.environ["BROKER_URL"])
app.conf.update(task_ignore_result=True, worker_enable_remote_control=False, worker_redirect_stdouts=False)


@app.task(name=TASK, shared=False)
def complete(*, envelope: dict[str, Any]) -> None:
    """Write down what was received."""
    sys.stdout.write(f"{json.dumps(envelope)}\n")
    sys.stdout.flush()
