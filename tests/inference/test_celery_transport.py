"""An inference worker's transport, with kombu on the real Valkey: what it has reserved, and what it puts back."""

import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import redis
from django.conf import settings

from acsinfra.quickstart.supervisor import PROJECT
from inference.bus.envelope import celery_message

# In a process of its own: the transport is set for a whole process.
CONSUME = """
import sys
import django
django.setup()
import redis
from django.conf import settings
from kombu import Connection, Queue
from inference.bus.envelope import celery_message
from inference.worker.celery_transport import reserve_in_memory

reserve_in_memory()
queue, broker = sys.argv[1], redis.Redis.from_url(settings.BROKER_URL)
before = set(broker.keys())
for number in range(5):
    broker.lpush(queue, celery_message(task="a.task", queue=queue, kwargs={"number": number}))

def consumer(channel):
    return connection.Consumer(Queue(queue), channel=channel, on_message=got.append, auto_declare=False)

def numbers():
    return [message.payload[1]["number"] for message in got]

def receive(count):
    while len(got) < count:
        connection.drain_events(timeout=60)

got = []
with Connection(settings.BROKER_URL, transport_options=settings.CELERY["broker_transport_options"]) as connection:
    with connection.channel() as channel:
        channel.basic_qos(0, 4, False)
        with consumer(channel):
            receive(4)
            assert numbers() == [0, 1, 2, 3], numbers()
            # As many as the prefetch, and none more until one is acknowledged; nothing of them is in Redis.
            assert broker.llen(queue) == 1
            assert set(broker.keys()) - before == {queue.encode()}, broker.keys()
            assert not channel.qos.can_consume()
            got[0].ack()
            got[1].requeue()
            receive(6)
            # What is put back while others wait is the next.
            assert sorted(numbers()[4:]) == [1, 4], numbers()
            got[5].ack()
    # The channel is closed with 2, 3 and one more reserved.
    left = numbers()[4]
    assert broker.llen(queue) == 3, broker.llen(queue)
    got.clear()
    with connection.channel() as channel:
        with consumer(channel):
            receive(3)
            assert numbers() == [2, 3, left], numbers()
            for message in got:
                message.ack()
    assert broker.llen(queue) == 0
    assert not set(broker.keys()) - before
print("kept")
"""

WORKER = """
import os, sys, time
import django
django.setup()
from acsinfra.celery import app
from inference.worker.celery_transport import reserve_in_memory

reserve_in_memory()

@app.task(name="a.task")
def a_task(number):
    os.write(1, b"begun %d\\n" % number)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    # The worker is told to stop by then, and does.
    time.sleep(2)
    os.write(1, b"ended %d\\n" % number)

app.Worker(hostname=f"{sys.argv[1]}@here", pool="threads", concurrency=2, queues=[sys.argv[1]], without_mingle=True,
           without_gossip=True, without_heartbeat=True, quiet=True, redirect_stdouts=False).start()
"""


def test_reserved_messages_are_in_memory_and_go_back_in_order() -> None:
    queue = f"reserved-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", CONSUME, queue]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=240)
    assert result.stdout == "kept\n", result.stderr


def test_a_celery_worker_that_stops_ends_what_runs_and_puts_back_the_rest_in_order(tmp_path: Path) -> None:
    queue = f"stopped-{secrets.token_hex(4)}"
    with redis.Redis.from_url(settings.BROKER_URL) as broker:
        messages = [celery_message(task="a.task", queue=queue, kwargs={"number": number}) for number in range(6)]
        broker.lpush(queue, *messages)
        may_end = tmp_path / "may-end"
        command = [sys.executable, "-c", WORKER, queue, str(may_end)]
        worker = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        # Whatever goes wrong, the lines below end.
        ends = threading.Timer(240, worker.kill)
        ends.start()
        begun = {worker.stdout.readline(), worker.stdout.readline()}
        assert begun == {"begun 0\n", "begun 1\n"}
        # Two run; two more are reserved.
        deadline = time.monotonic() + 60
        while broker.llen(queue) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.send_signal(signal.SIGTERM)
        may_end.touch()
        output, errors = worker.communicate(timeout=60)
        ends.cancel()
        assert worker.returncode == 0, errors
        tasks = [line for line in output.splitlines() if line.startswith(("begun", "ended"))]
        assert sorted(tasks) == ["ended 0", "ended 1"]
        # The next is taken from the right. To the byte as they were: an API process looks for its own.
        assert broker.lrange(queue, 0, -1) == messages[:1:-1]
        broker.delete(queue)
