"""What an inference worker does with a Completion that never gets as far as the engine: here no engine is there yet."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NoReturn

import msgspec
import pytest

from acsinfra.core.courier import Courier
from acsinfra.core.errors import ErrorCode
from inference.bus import keys
from inference.bus.api import Bus
from inference.bus.envelope import Envelope
from inference.bus.frames import Cancel, Fault, Frame, Stopped, Taken
from inference.bus.replies import Inbox
from inference.wire import CompletionWork, Sampling
from inference.worker.completions import CompletionService
from inference.worker.control import ControlReader
from inference.worker.engine_life import EngineLife
from tests.inference.broker import Broker
from tests.inference.test_bus import until

# Far less than a request's 60 seconds: what needs no engine does not wait for one.
SOON_SECONDS = 30


class Exchange:
    """A worker's service and the API process that waits for it."""

    def __init__(self, bus: Bus, courier: Courier, broker_url: str) -> None:
        async def never() -> NoReturn:
            raise AssertionError("no engine is started here")

        life = EngineLife(start=never, on_live=lambda: None, on_dead=lambda: None, on_lost=lambda: None)
        self.bus = bus
        self.broker_url = broker_url
        self.courier = courier
        self.service = CompletionService(
            worker="worker-1",
            life=life,
            courier=courier,
            decode=str,
            prompts_at_once=4,
            listening_since=time.monotonic,
        )

    def envelope(self, request_id: str, *, seconds: float = 60.0) -> Envelope:
        work = CompletionWork(
            request_id=request_id,
            model="tiny",
            served_model_name="tiny",
            created=0,
            deadline=time.time() + seconds,
            prompts=((1, 2),),
            prompt_texts=(None,),
            sampling=Sampling(max_tokens=1),
            hold_tokens=3,
        )
        return Envelope(
            request_id=request_id,
            reply_to=self.bus.process,
            deadline=work.deadline,
            work=msgspec.Raw(msgspec.json.encode(work)),
        )

    async def serve(self, envelope: Envelope) -> None:
        """Have the worker take it; returns when its last frame is on its way."""
        task = self.service.take(envelope)
        if task is not None:
            await asyncio.wait([task])

    def inbox(self, request_id: str) -> Inbox:
        inbox = Inbox(request_id=request_id, model="tiny", courier=self.courier)
        self.bus._inboxes[request_id] = inbox
        return inbox

    async def fault(self, inbox: Inbox) -> Fault:
        async with asyncio.timeout(SOON_SECONDS):
            frame: Frame = await inbox.next()
        assert isinstance(frame, Fault)
        return frame


@pytest.fixture
async def exchange(broker: Broker) -> AsyncIterator[Exchange]:
    async def always(model: str) -> bool:
        return True

    bus, courier = Bus(url=broker.url, is_served=always), Courier(broker.url)
    await bus.ready()
    yield Exchange(bus, courier, broker.url)
    await bus.close()
    await courier.close()


async def test_a_cancel_that_overtakes_its_request_is_obeyed(exchange: Exchange) -> None:
    exchange.service.obey(Cancel("req_1"))
    async with asyncio.timeout(SOON_SECONDS):
        await exchange.serve(exchange.envelope("req_1"))


async def test_a_cancel_from_before_the_worker_began_has_left_its_mark(exchange: Exchange) -> None:
    await exchange.courier.ask("SET", keys.cancelled("req_2"), "1", "EX", 60)
    async with asyncio.timeout(SOON_SECONDS):
        await exchange.serve(exchange.envelope("req_2"))
    assert exchange.service.busy_processes() == set()


async def test_a_request_that_comes_too_late_is_not_begun(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_3")
    await exchange.serve(exchange.envelope("req_3", seconds=-1))
    assert (await exchange.fault(inbox)).code == "engine_timeout"


async def test_a_request_waits_for_its_engine_until_its_deadline_only(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_4")
    started = time.monotonic()
    await exchange.serve(exchange.envelope("req_4", seconds=0.5))
    assert 0.3 < time.monotonic() - started < 5
    assert (await exchange.fault(inbox)).code == "engine_timeout"


async def test_work_whose_pieces_are_gone_is_a_fault(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_5")
    await exchange.serve(msgspec.structs.replace(exchange.envelope("req_5"), pieces=2))
    assert (await exchange.fault(inbox)).code == "service_unavailable"


async def test_a_request_that_is_given_out_twice_runs_once(exchange: Exchange) -> None:
    first = asyncio.create_task(exchange.serve(exchange.envelope("req_6")))
    await asyncio.sleep(0.05)
    # The API process sends again what no worker says it has: Redis lost the word.
    inbox = exchange.inbox("req_6")
    async with asyncio.timeout(SOON_SECONDS):
        await exchange.serve(exchange.envelope("req_6"))
    assert not first.done()
    await until(lambda: inbox.worker == "worker-1")
    exchange.service.obey(Cancel("req_6"))
    async with asyncio.timeout(SOON_SECONDS):
        await first
        # What comes a second time once nobody waits for it is not begun.
        await exchange.serve(exchange.envelope("req_6"))


async def test_a_worker_says_soon_what_it_has(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_7")
    seen: list[Frame] = []
    accept = inbox.accept

    def keep(frame: Frame, *, worker: str) -> None:
        seen.append(frame)
        accept(frame, worker=worker)

    inbox.accept = keep  # type: ignore[method-assign]
    exchange.service.take(exchange.envelope("req_7"))
    await until(lambda: inbox.worker == "worker-1")
    assert seen == [Taken("req_7", "worker-1")]
    exchange.service.abort_all()


async def test_a_request_that_is_stopped_before_its_first_step_is_counted_as_nothing(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_14")
    last = inbox.skip_to_last()
    exchange.service.take(exchange.envelope("req_14"))
    exchange.service.obey(Cancel("req_14"))
    async with asyncio.timeout(SOON_SECONDS):
        assert await last == Stopped("req_14", 0, 0)
    assert exchange.service.n_running == 0


async def test_a_worker_that_stops_waits_for_what_it_has_and_then_ends_it(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_15")
    await exchange.service.finish(within=SOON_SECONDS)
    exchange.service.take(exchange.envelope("req_15"))
    async with asyncio.timeout(SOON_SECONDS):
        await exchange.service.finish(within=0.1)
    assert (await exchange.fault(inbox)).message == "The inference worker is stopping."
    assert exchange.service.n_running == 0


async def test_what_still_runs_when_time_is_up_ends_with_an_error(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_8")
    serving = asyncio.create_task(exchange.serve(exchange.envelope("req_8")))
    await asyncio.sleep(0.05)
    exchange.service.abort_all()
    assert (await exchange.fault(inbox)).code == "engine_error"
    async with asyncio.timeout(SOON_SECONDS):
        await serving


async def test_the_requests_of_an_api_process_that_is_gone_are_stopped(exchange: Exchange) -> None:
    envelope = msgspec.structs.replace(exchange.envelope("req_9"), reply_to="no-such-process")
    async with asyncio.timeout(SOON_SECONDS):
        await exchange.serve(envelope)
    assert exchange.service.busy_processes() == set()


# What was counted


async def test_a_request_that_is_stopped_says_what_it_counted(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_10")
    control = ControlReader(url=exchange.broker_url, model="tiny", on_message=exchange.service.obey)
    await control.listening.wait()
    serving = asyncio.create_task(exchange.serve(exchange.envelope("req_10")))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(SOON_SECONDS):
        assert await exchange.bus.stop(inbox) == (0, 0)
        await serving
    # Redis lost the last frame: the worker says it again.
    again = exchange.inbox("req_10")
    async with asyncio.timeout(SOON_SECONDS):
        assert await exchange.bus.stop(again) == (0, 0)
    assert exchange.bus.waiting == 0
    await control.close()


async def test_a_request_that_no_worker_knows_has_the_count_that_one_left(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.bus.api.LAST_COUNT_SECONDS", 0.2)
    await exchange.courier.ask("SET", keys.count("req_11"), "5 6", "EX", 60)
    assert await exchange.bus.stop(exchange.inbox("req_11")) == (5, 6)
    assert await exchange.bus.stop(exchange.inbox("req_12")) is None
    exchange.bus.forget_count("req_11")
    assert await exchange.bus.left_count("req_11") is None


async def test_a_request_whose_worker_died_has_the_count_that_it_left(exchange: Exchange) -> None:
    inbox = exchange.inbox("req_13")
    await exchange.courier.ask("SET", keys.count("req_13"), "7 8", "EX", 60)
    stopping = asyncio.create_task(exchange.bus.stop(inbox))
    await asyncio.sleep(0.05)
    exchange.bus._fail([inbox], ErrorCode.ENGINE_ERROR, "The inference worker died under this request.")
    async with asyncio.timeout(SOON_SECONDS):
        assert await stopping == (7, 8)


async def test_a_bus_closes_once_what_was_detached_has_ended(broker: Broker) -> None:
    async def always(model: str) -> bool:
        return True

    bus = Bus(url=broker.url, is_served=always)
    await bus.ready()
    ended: list[str] = []

    async def settle() -> None:
        await asyncio.sleep(0.1)
        ended.append("hold")

    async def answer() -> None:
        await asyncio.sleep(0.1)
        bus.detach(settle(), name="hold")
        ended.append("answer")

    bus.detach(answer(), name="answer")
    await bus.close()
    assert ended == ["answer", "hold"]
