"""The publishing thread and its sockets, without a tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq

from helpers.event_sockets import description_of, ipc_config, wait_until
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.events.client import (
    AT_ONCE,
    EventStream,
    InspectClient,
    RequestFailedError,
    ServerSilentError,
    check_endpoint,
    reachable,
)
from sgl_kvevict.events.questions import Describe, Description, Failure, NodeGone, Status, Tokens, TokensReport
from sgl_kvevict.events.service import _TICK_MS, MAX_BATCH_EVENTS, MAX_WAITING_QUESTIONS, EventService
from sgl_kvevict.events.types import Cleared, Dropped, EventBatch, EventsLost, Split
from sgl_kvevict.launcher import free_port


@pytest.fixture
def config(tmp_path):
    return ipc_config(tmp_path)


@pytest.fixture
def service(config):
    service = EventService(config, description_of(config))
    yield service
    service.close()


PROBE = Dropped(-1, 0, 0, False)


async def subscribed(stream: EventStream, service: EventService) -> None:
    """Publish probes until one arrives: what is published before the subscription is not sent."""
    while not await stream._socket.poll(20):
        service.publish(PROBE)


def collect(service: EventService, count: int, ready: Callable[[], object]) -> list:
    """Run a stream until it has delivered ``count`` events of those that ``ready`` publishes; what it received."""
    config = service.config

    async def run() -> list:
        received = []
        async with EventStream(config.endpoint, config.replay_endpoint, config.topic) as stream:
            await subscribed(stream, service)
            ready()
            async for item in stream.batches():
                received.append(item)
                if len(events_of(received)) >= count:
                    return received
        raise AssertionError

    return asyncio.run(asyncio.wait_for(run(), 300))


def events_of(received: list) -> list:
    return [event for item in received for event in item.batch.events if event != PROBE]


def test_events_arrive_in_order_in_numbered_batches(config, service):
    events = [Split(i, i + 1, 7) for i in range(50)]

    def publish() -> None:
        for i, event in enumerate(events):
            service.publish(event)
            if i % 10 == 0:
                time.sleep(0.06)

    received = collect(service, 50, ready=publish)
    assert events_of(received) == events
    assert [item.seq for item in received] == list(range(received[0].seq, received[-1].seq + 1))
    assert all(item.missed == 0 and item.batch.attn_dp_rank == 0 for item in received)


def test_the_wire_format_is_that_of_sglangs_kv_events(config, service):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(config.endpoint)
    before = time.time()
    while not sub.poll(50):  # what is published before the subscription arrives is not sent
        service.publish(Dropped(3, 4, 5, True))
    topic, seq, payload = sub.recv_multipart()
    assert topic == b"kvevict" and len(seq) == 8
    wait_until(lambda: int.from_bytes(seq, "big") < service._next_seq)  # a batch is counted after it was sent
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert events[0] == {"type": "Dropped", "node": 3, "tokens": 4, "slots": 5, "compressed": True}
    assert rank == 0 and before <= ts <= time.time()
    context.destroy(linger=0)


def test_a_late_subscriber_gets_the_past_from_the_replay_socket(config, service):
    for i in range(3):
        service.publish(Split(i, i, i))
        wait_until(lambda i=i: service._next_seq == i + 1)

    async def run() -> list:
        received = []
        async with EventStream(config.endpoint, config.replay_endpoint) as stream:
            async for item in stream.batches(1):
                received.append(item)
                if len(received) == 2:
                    await subscribed(stream, service)
                if PROBE in item.batch.events:
                    return received
        raise AssertionError

    received = asyncio.run(asyncio.wait_for(run(), 300))
    assert events_of(received) == [Split(1, 1, 1), Split(2, 2, 2)]
    assert [item.seq for item in received] == list(range(1, len(received) + 1))  # what was missed is fetched


def test_a_gap_is_filled_by_replay_and_reported_when_it_cannot_be(config):
    small = config.model_copy(update={"buffer_steps": 2})
    service = EventService(small, description_of(small))
    context = zmq.Context()

    async def run() -> list:
        received = []
        async with EventStream(small.endpoint, small.replay_endpoint) as stream:
            await subscribed(stream, service)
            service.publish(Split(0, 0, 0))
            async for item in stream.batches():
                received.append(item)
                if Split(0, 0, 0) in item.batch.events:  # the subscriber sleeps through five batches
                    while service._next_seq != item.seq + 1:  # the publishing thread counts a batch after sending it
                        await asyncio.sleep(0.001)
                    service._next_seq += 5
                    service.publish(Cleared())
                elif Cleared() in item.batch.events:
                    return received
        raise AssertionError

    *_, before, after = asyncio.run(asyncio.wait_for(run(), 300))
    assert after.seq == before.seq + 6 and after.missed == 5
    service.close()
    context.destroy()


def test_a_restarted_server_is_followed(config):
    first = EventService(config, description_of(config))
    seen = []

    async def publish_until_cancelled(service: EventService) -> None:
        while True:  # what comes before the subscription is followed by more: nobody waits for it
            service.publish(Cleared())
            await asyncio.sleep(0.3)

    async def run() -> None:
        async with EventStream(config.endpoint, config.replay_endpoint) as stream:
            await subscribed(stream, first)
            for i in range(5):
                first.publish(Split(i, i, i))
                await asyncio.sleep(0.07)
            async for item in stream.batches():
                seen.extend(events_of([item]))
                if len(seen) == 5:
                    first.close()
                    second = EventService(config, description_of(config))
                    publishing = asyncio.create_task(publish_until_cancelled(second))
                if Cleared() in seen:
                    publishing.cancel()
                    second.close()
                    return

    asyncio.run(asyncio.wait_for(run(), 300))
    assert seen[:6] == [Split(i, i, i) for i in range(5)] + [Cleared()]


def test_a_full_queue_drops_counts_and_says_so(config):
    tiny = config.model_copy(update={"max_queue_size": 3})
    service = EventService(tiny, description_of(tiny))

    def burst() -> None:
        for i in range(200_000):
            service.publish(Split(i, i, i))

    received = collect(service, 4, ready=burst)
    events = events_of(received)
    assert events[0] == Split(0, 0, 0) and any(isinstance(event, EventsLost) for event in events)
    assert service.totals.lost_events > 0
    service.close()


def test_a_burst_is_cut_into_messages_of_bounded_size(config, service):
    num_events = 2 * MAX_BATCH_EVENTS + 5

    def burst() -> None:
        for i in range(num_events):
            service.publish(Split(i, i, i))

    received = collect(service, num_events, ready=burst)
    assert max(len(item.batch.events) for item in received) <= MAX_BATCH_EVENTS
    assert [event.upper for event in events_of(received)] == list(range(num_events))


def test_publishing_does_not_wait_for_a_subscriber_that_does_not_read(config):
    narrow = config.model_copy(update={"hwm": 1, "buffer_steps": 1})
    service = EventService(narrow, description_of(narrow))
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.set_hwm(1)
    sub.subscribe(b"")
    sub.connect(narrow.endpoint)
    for _ in range(20):
        for i in range(1000):
            service.publish(Split(i, i, i))
        wait_until(lambda: not service._events)  # sent or dropped by the socket: nothing waits for the subscriber
    assert service.totals.lost_events == 0
    context.destroy(linger=0)
    service.close()


def test_what_is_queued_at_shutdown_still_goes_out(config):
    service = EventService(config, description_of(config))

    def publish_and_close() -> None:
        service.publish(Cleared())
        service.close()
        service.close()

    assert events_of(collect(service, 1, ready=publish_and_close)) == [Cleared()]


def test_description_is_answered_without_the_scheduler(config, service):
    async def run() -> Description:
        async with InspectClient(config.inspect_endpoint, timeout_s=300) as client:
            return await client.ask(Describe(), Description)

    service.publish(Cleared())
    wait_until(lambda: service._next_seq == 1)
    assert asyncio.run(run()) == msgspec.structs.replace(description_of(config), next_seq=1)


def test_questions_reach_the_scheduler_and_answers_the_asker(config, service):
    async def run() -> list:
        async with (
            InspectClient(config.inspect_endpoint, timeout_s=300) as a,
            InspectClient(config.inspect_endpoint, timeout_s=300) as b,
        ):
            asked = asyncio.gather(a.ask(Tokens(1), TokensReport), b.ask(Tokens(2), TokensReport))
            while not asked.done():
                await asyncio.sleep(0.001)
                for question in service.take_questions():
                    service.answer(question, TokensReport(question.request.node, [question.request.node] * 3))
            return asked.result()

    assert asyncio.run(run()) == [TokensReport(1, [1, 1, 1]), TokensReport(2, [2, 2, 2])]


def test_many_questions_wait_together_and_a_gone_node_costs_no_other_its_answer(config, service):
    turns = []

    async def run() -> list:
        async with InspectClient(config.inspect_endpoint, timeout_s=300) as client:
            asked = asyncio.ensure_future(client.ask_each([Tokens(i) for i in range(AT_ONCE + 4)], TokensReport))
            while not asked.done():
                await asyncio.sleep(0.05)  # a scheduler that sleeps
                questions = list(service.take_questions())
                turns.append(len(questions))
                for question in reversed(questions):
                    node = question.request.node
                    service.answer(question, NodeGone("gone") if node == 3 else TokensReport(node, [node]))
            return await asked

    expected = [TokensReport(i, [i]) if i != 3 else None for i in range(AT_ONCE + 4)]
    assert asyncio.run(run()) == expected
    assert sorted(filter(None, turns))[-1] > 1 and len([turn for turn in turns if turn]) < AT_ONCE


def test_a_refusal_is_not_a_node_that_is_gone(config, service):
    async def run() -> list:
        async with InspectClient(config.inspect_endpoint, timeout_s=300) as client:
            asked = asyncio.ensure_future(client.ask_each([Tokens(1), Tokens(2)], TokensReport))
            while not asked.done():
                await asyncio.sleep(0.001)
                for question in service.take_questions():
                    service.answer(question, Failure("busy"))
            return await asked

    with pytest.raises(RequestFailedError, match="busy"):
        asyncio.run(run())


def test_a_silent_scheduler_is_an_error_and_its_late_answer_is_not_mistaken(config, service):
    async def run() -> TokensReport:
        async with InspectClient(config.inspect_endpoint, timeout_s=0.3) as client:
            with pytest.raises(ServerSilentError, match=r"no answer from ipc://.* within 0\.3 s"):
                await client.ask(Tokens(1), TokensReport)
            late = list(service.take_questions())
            client.timeout_s = 300
            task = asyncio.ensure_future(client.ask(Tokens(2), TokensReport))
            while not service._questions:
                await asyncio.sleep(0.001)
            for question in (*late, *service.take_questions()):
                service.answer(question, TokensReport(question.request.node, []))
            return await task

    assert asyncio.run(run()).node == 2


def test_a_failure_and_a_foreign_answer_are_errors(config, service):
    async def ask(reply) -> None:
        async with InspectClient(config.inspect_endpoint, timeout_s=300) as client:
            task = asyncio.ensure_future(client.ask(Status(), TokensReport))
            while not service._questions:
                await asyncio.sleep(0.001)
            for question in service.take_questions():
                service.answer(question, reply)
            await task

    with pytest.raises(RequestFailedError, match="no such thing"):
        asyncio.run(ask(Failure("no such thing")))
    with pytest.raises(RequestFailedError, match="expected TokensReport, got Description"):
        asyncio.run(ask(description_of(config)))


def test_too_many_waiting_questions_are_turned_away(config, service):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(config.inspect_endpoint)
    for _ in range(MAX_WAITING_QUESTIONS + 3):
        dealer.send_multipart([b"", msgspec.msgpack.encode(Status())])
    for _ in range(3):
        reply = msgspec.msgpack.decode(dealer.recv_multipart()[-1], type=Failure)
        assert reply.error == f"busy: {MAX_WAITING_QUESTIONS} questions wait already"
    assert len(list(service.take_questions())) == MAX_WAITING_QUESTIONS
    context.destroy(linger=0)


def test_addresses_in_use_are_refused_at_start_all_at_once():
    port = free_port()
    config = EventsConfig(
        endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None, inspect_endpoint=f"tcp://127.0.0.1:{free_port()}"
    )
    service = EventService(config, description_of(config))
    with pytest.raises(ConfigError, match=r"events\.endpoint: .* cannot be bound(.|\n)*events\.inspect_endpoint: "):
        EventService(config, description_of(config))
    service.close()
    EventService(config, description_of(config)).close()


@pytest.mark.parametrize(
    ("bound", "asked", "expected"),
    [
        ("tcp://*:1", "tcp://10.0.0.7:3", "tcp://10.0.0.7:1"),
        ("tcp://0.0.0.0:1", "tcp://gpu-7:3", "tcp://gpu-7:1"),
        ("tcp://[::]:1", "tcp://[fe80::1]:3", "tcp://[fe80::1]:1"),
        ("tcp://127.0.0.1:1", "tcp://localhost:3", "tcp://localhost:1"),
        ("tcp://10.0.0.9:1", "tcp://10.0.0.7:3", "tcp://10.0.0.9:1"),
        ("ipc:///tmp/a", "tcp://10.0.0.7:3", "ipc:///tmp/a"),
    ],
)
def test_the_stream_is_found_on_the_host_that_was_asked(bound, asked, expected):
    assert reachable(bound, asked) == expected


def test_endpoints_of_the_command_line():
    assert check_endpoint("localhost:5659") == "tcp://localhost:5659"
    assert check_endpoint("ipc:///tmp/x") == "ipc:///tmp/x"
    with pytest.raises(ConfigError, match="got 'http://x:1'; allowed: tcp://HOST:PORT"):
        check_endpoint("http://x:1")


def test_batches_decode_to_typed_events():
    batch = EventBatch(1.0, [Cleared(), Split(1, 2, 3)], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch) == batch


def test_without_sockets_to_read_the_thread_sleeps(config, monkeypatch):
    turns = []
    publish = EventService._publish_queued
    monkeypatch.setattr(EventService, "_publish_queued", lambda self: turns.append(1) or publish(self))
    waits, sleep = [], time.sleep
    tick = _TICK_MS / 1e3
    monkeypatch.setattr(time, "sleep", lambda seconds: (waits.append(1) if seconds == tick else None, sleep(seconds)))
    silent = config.model_copy(update={"replay_endpoint": None, "inspect_endpoint": None})
    service = EventService(silent, description_of(silent))
    wait_until(lambda: len(turns) > 5)
    service.close()
    assert len(turns) <= len(waits) + 2  # each turn waits, but for the last one and the one after the loop
