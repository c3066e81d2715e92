"""The thread that owns the event socket, without a tree."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from helpers.event_sockets import description_of, ipc_config, wait_until
from kvevict_tools.launcher import free_port
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.events.client import AT_ONCE, InspectClient, RequestFailedError, ServerSilentError, check_endpoint
from sgl_kvevict.events.questions import (
    Describe,
    Description,
    Failure,
    NodeGone,
    Status,
    StatusReport,
    Tokens,
    TokensReport,
)
from sgl_kvevict.events.service import MAX_BATCH_EVENTS, MAX_FOLLOWERS, MAX_WAITING_QUESTIONS, EventService
from sgl_kvevict.events.totals import Gauges, Pool, Totals
from sgl_kvevict.events.types import Cleared, Dropped, EventBatch, Split


@pytest.fixture
def config(tmp_path):
    return ipc_config(tmp_path)


@pytest.fixture
def service(config):
    service = EventService(config, description_of(config))
    yield service
    service.close()


SPLITS = [Split(i, i + 1, 7) for i in range(2000)]


def report(service: EventService) -> StatusReport:
    """The scheduler's answer; only its numbers matter here."""
    gauges = msgspec.convert(
        {name: 0 for name in Gauges.__struct_fields__ if name != "pool"} | {"pool": Pool(0, 0, 0, 0, 0)}, Gauges
    )
    return StatusReport(1.0, service._description.started, service.next_event, gauges, Totals(), [])


def answer_all(service: EventService) -> int:
    """The scheduler is between two steps; returns how many asked."""
    questions = list(service.take_questions())
    for question in questions:
        service.answer(question, report(service))
    return len(questions)


def followed(
    service: EventService, until: Callable[[list], bool], act: Callable[[list], None] = lambda seen: None
) -> list:
    """What a client that follows receives, until that is enough; ``act`` is called after each part with all of them."""

    async def scheduler() -> None:
        while True:
            answer_all(service)
            await asyncio.sleep(0.001)

    async def run() -> list:
        seen: list = []
        turning = asyncio.create_task(scheduler())
        async with InspectClient(service.config.endpoint, timeout_s=300) as client:
            async for part in client.follow():
                seen.append(part)
                act(seen)
                if until(seen):
                    turning.cancel()
                    return seen
        raise AssertionError

    return asyncio.run(asyncio.wait_for(run(), 300))


def test_events_that_an_answer_counts_are_sent_before_it(service, monkeypatch):
    """Also if the scheduler publishes and answers while the thread is between sending events and sending answers."""
    publish_queued, published = service._publish_queued, []

    def scheduler_acts_behind() -> None:
        publish_queued()
        for question in service.take_questions():
            if service._followers and len(published) < 5:
                published.append(SPLITS[len(published)])
                service.publish(published[-1])
            service.answer(question, report(service))

    monkeypatch.setattr(service, "_publish_queued", scheduler_acts_behind)

    async def run() -> list:
        async with InspectClient(service.config.endpoint, timeout_s=300) as client:
            numbers = []
            for _ in range(5):
                number = (await client.ask(Status(follow=True), StatusReport)).next_event
                numbers.append((number, [event for batch in client.take_batches() for event in batch.events]))
            return numbers

    assert asyncio.run(asyncio.wait_for(run(), 300)) == [(i + 1, [SPLITS[i]]) for i in range(5)]


def events_of(seen: list) -> list:
    return [event for part in seen if isinstance(part, EventBatch) for event in part.events]


def snapshots(seen: list) -> list[int]:
    """Numbers of events at which snapshots were taken."""
    return [part.next_event for part in seen if isinstance(part, StatusReport)]


def test_a_snapshot_comes_first_and_all_later_events_follow_in_order(service):
    for event in SPLITS[:3]:
        service.publish(event)

    def act(seen: list) -> None:
        if len(seen) == 1:
            for i, event in enumerate(SPLITS[3:50]):
                service.publish(event)
                if i % 10 == 0:
                    time.sleep(0.06)

    seen = followed(service, lambda seen: len(events_of(seen)) == 47, act)
    assert snapshots(seen) == [3] and isinstance(seen[0], StatusReport)
    assert events_of(seen) == SPLITS[3:50]
    numbers = [number for part in seen[1:] for number in range(part.first, part.end)]
    assert numbers == list(range(3, 50)) and all(part.rank == 0 and part.started == 1.0 for part in seen[1:])


def test_the_wire_format(config, service):
    """An empty frame and a msgpack map; what is told between the question and its answer is sent before that."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    dealer.connect(config.endpoint)
    before = time.time()
    dealer.send_multipart([b"ticket", b"", msgspec.msgpack.encode({"op": "status", "limit": 0, "follow": True})])
    wait_until(lambda: bool(service._questions))
    service.publish(Dropped(3, 4, 5, True))
    answer_all(service)
    empty, payload = dealer.recv_multipart()
    batch = msgspec.msgpack.decode(payload)
    assert empty == b"" and before <= batch.pop("ts") <= time.time()
    event = {"type": "Dropped", "node": 3, "tokens": 4, "slots": 5, "compressed": True}
    assert batch == {"type": "EventBatch", "first": 0, "started": 1.0, "events": [event], "rank": 0}
    ticket, empty, payload = dealer.recv_multipart()
    assert (ticket, empty) == (b"ticket", b"") and msgspec.msgpack.decode(payload)["next_event"] == 1
    context.destroy(linger=0)


def test_without_a_reader_events_are_numbered_and_nothing_waits(service):
    for event in SPLITS:
        service.publish(event)
    assert service.next_event == 2000 and not service._events and service.totals.lost_events == 0


def test_a_gap_in_the_numbers_is_followed_by_a_snapshot(service):
    def act(seen: list) -> None:
        if len(seen) == 1:
            service.publish(SPLITS[0])
        elif snapshots(seen) == [0, 7]:
            service.publish(SPLITS[7])
        elif events_of(seen) == SPLITS[:1]:
            service.next_event += 5  # as if five events had not reached this client
            service.publish(SPLITS[6])

    seen = followed(service, lambda seen: SPLITS[7] in events_of(seen), act)
    assert snapshots(seen) == [0, 7] and events_of(seen) == [SPLITS[0], SPLITS[7]]


def test_a_client_asks_again_in_time_and_notices_what_it_missed_meanwhile(monkeypatch, service):
    """Here it asks ten times a second, and the server forgets it once."""
    monkeypatch.setattr("sgl_kvevict.events.client.FOLLOW_S", 0.3)

    def act(seen: list) -> None:
        if len(seen) == 1:
            service.publish(SPLITS[0])
        elif len(snapshots(seen)) == 1:
            service._followers.clear()
            service.publish(SPLITS[1])

    seen = followed(service, lambda seen: len(snapshots(seen)) == 2, act)
    assert snapshots(seen) == [0, 2] and events_of(seen) == SPLITS[:1]


def test_who_does_not_ask_again_is_forgotten(config, service, monkeypatch):
    monkeypatch.setattr("sgl_kvevict.events.service.FOLLOW_S", 0.05)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(config.endpoint)
    dealer.send_multipart([b"", msgspec.msgpack.encode(Status(follow=True))])
    wait_until(lambda: bool(service._questions))
    answer_all(service)
    wait_until(lambda: not service._followers)
    context.destroy(linger=0)


def test_a_restarted_server_is_followed(config):
    services = [EventService(config, description_of(config))]

    def act(seen: list) -> None:
        if len(seen) == 1:
            for event in SPLITS[:5]:
                services[0].publish(event)
        elif isinstance(seen[-1], StatusReport) and seen[-1].started == 2.0:
            services[1].publish(SPLITS[9])
        elif len(events_of(seen)) == 5 and len(services) == 1:
            services[0].close()
            services.append(EventService(config, description_of(config, started=2.0)))

    async def scheduler() -> None:
        while True:
            answer_all(services[-1])
            await asyncio.sleep(0.001)

    async def run() -> list:
        seen: list = []
        turning = asyncio.create_task(scheduler())
        async with InspectClient(config.endpoint, timeout_s=1) as client:
            while True:
                try:
                    async for part in client.follow():
                        seen.append(part)
                        act(seen)
                        if SPLITS[9] in events_of(seen):
                            turning.cancel()
                            return seen
                except ServerSilentError:
                    pass  # it was asked while the server was down

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_kvevict.events.client.FOLLOW_S", 0.3)
        seen = asyncio.run(asyncio.wait_for(run(), 300))
    assert events_of(seen) == [*SPLITS[:5], SPLITS[9]]
    assert [part.started for part in seen if isinstance(part, StatusReport)][-1] == 2.0
    services[1].close()


def test_a_full_queue_drops_and_counts_and_the_reader_sees_the_gap(config):
    tiny = config.model_copy(update={"max_queue_size": 3})
    service = EventService(tiny, description_of(tiny))

    def act(seen: list) -> None:
        if len(seen) == 1:
            while not service.totals.lost_events:
                for event in SPLITS:
                    service.publish(event)

    seen = followed(service, lambda seen: len(snapshots(seen)) == 2, act)
    assert service.totals.lost_events > 0 and snapshots(seen)[1] == service.next_event
    service.close()


def test_a_burst_is_cut_into_messages_of_bounded_size(service):
    num_events = 2 * MAX_BATCH_EVENTS + 5

    def act(seen: list) -> None:
        if len(seen) == 1:
            for event in SPLITS[:num_events]:
                service.publish(event)

    seen = followed(service, lambda seen: len(events_of(seen)) == num_events, act)
    assert max(len(part.events) for part in seen[1:]) <= MAX_BATCH_EVENTS
    assert events_of(seen) == SPLITS[:num_events] and snapshots(seen) == [0]


def test_a_reader_that_does_not_read_costs_bounded_memory_and_sees_a_gap(monkeypatch, tmp_path):
    """The scheduler does not wait, others get everything, and the reader begins anew with a snapshot."""
    monkeypatch.setattr("sgl_kvevict.events.service.MAX_UNREAD_MESSAGES", 2)
    config = EventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}")
    service = EventService(config, description_of(config))
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.set_hwm(1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.connect(config.endpoint)
    deaf.send_multipart([b"", msgspec.msgpack.encode(Status(follow=True))])
    wait_until(lambda: bool(service._questions))
    answer_all(service)
    for _ in range(200):
        for event in SPLITS[:MAX_BATCH_EVENTS]:
            service.publish(event)
        wait_until(lambda: not service._events)  # sent or dropped by the socket: nothing waits for the reader
    assert service.totals.lost_events == 0
    received = 0
    deaf.setsockopt(zmq.RCVTIMEO, 500)
    with pytest.raises(zmq.Again):
        while True:
            received += len(deaf.recv_multipart()) == 2
    assert 0 < received < 200
    context.destroy(linger=0)
    service.close()


def test_what_is_queued_at_shutdown_still_goes_out(config):
    service = EventService(config, description_of(config))

    def act(seen: list) -> None:
        if len(seen) == 1:
            service.publish(Cleared())
            service.close()
            service.close()

    assert events_of(followed(service, lambda seen: len(seen) == 2, act)) == [Cleared()]


async def described(config: EventsConfig) -> Description:
    async with InspectClient(config.endpoint, timeout_s=300) as client:
        return await client.ask(Describe(), Description)


def test_description_is_answered_without_the_scheduler(config, service):
    assert asyncio.run(described(config)) == description_of(config)


def test_questions_reach_the_scheduler_and_answers_the_asker(config, service):
    async def run() -> list:
        async with (
            InspectClient(config.endpoint, timeout_s=300) as a,
            InspectClient(config.endpoint, timeout_s=300) as b,
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
        async with InspectClient(config.endpoint, timeout_s=300) as client:
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
        async with InspectClient(config.endpoint, timeout_s=300) as client:
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
        async with InspectClient(config.endpoint, timeout_s=0.3) as client:
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
        async with InspectClient(config.endpoint, timeout_s=300) as client:
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
    dealer.connect(config.endpoint)
    for _ in range(MAX_WAITING_QUESTIONS + 3):
        dealer.send_multipart([b"", msgspec.msgpack.encode(Status())])
    for _ in range(3):
        reply = msgspec.msgpack.decode(dealer.recv_multipart()[-1], type=Failure)
        assert reply.error == f"busy: {MAX_WAITING_QUESTIONS} questions wait already"
    assert len(list(service.take_questions())) == MAX_WAITING_QUESTIONS
    context.destroy(linger=0)


def test_too_many_followers_are_turned_away_and_others_go_on(config, service):
    context = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(MAX_FOLLOWERS + 1)]
    for dealer in dealers:
        dealer.setsockopt(zmq.RCVTIMEO, 60_000)
        dealer.connect(config.endpoint)
    follow = msgspec.msgpack.encode(Status(limit=0, follow=True))

    def asked(dealer: zmq.Socket) -> dict:
        dealer.send_multipart([b"", follow])
        while not dealer.poll(1):
            answer_all(service)
        return msgspec.msgpack.decode(dealer.recv_multipart()[-1])

    *first, last = dealers
    assert {asked(dealer)["type"] for dealer in first} == {"StatusReport"}
    assert asked(last)["error"] == f"busy: {MAX_FOLLOWERS} clients follow the events already"
    assert asked(first[0])["type"] == "StatusReport"  # it asks again
    last.send_multipart([b"", msgspec.msgpack.encode(Status(limit=0))])
    while not last.poll(1):
        answer_all(service)
    assert msgspec.msgpack.decode(last.recv_multipart()[-1])["type"] == "StatusReport"
    context.destroy(linger=0)


def test_an_address_in_use_is_refused_at_start():
    config = EventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}")
    service = EventService(config, description_of(config))
    with pytest.raises(ConfigError, match=r"events\.endpoint: .* cannot be bound"):
        EventService(config, description_of(config))
    service.close()
    EventService(config, description_of(config)).close()


def test_another_servers_socket_and_a_file_are_not_replaced(config, service):
    """ZeroMQ removes whatever has the name of a socket that it binds."""
    with pytest.raises(
        ConfigError, match=r"events\.endpoint: .* cannot be bound \(a server listens there\); allowed: a"
    ):
        EventService(config, description_of(config))
    assert asyncio.run(described(config)) == description_of(config)
    file = Path(config.endpoint.removeprefix("ipc://")).with_name("notes")
    file.write_text("mine")
    taken = EventsConfig(endpoint=f"ipc://{file}")
    with pytest.raises(ConfigError, match=r"events\.endpoint: .* cannot be bound \(it is no socket\); allowed: a free"):
        EventService(taken, description_of(taken))
    assert file.read_text() == "mine"


def test_the_socket_of_a_server_that_was_killed_is_replaced(config):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(config.endpoint.removeprefix("ipc://"))
    service = EventService(config, description_of(config))
    assert asyncio.run(described(config)) == description_of(config)
    service.close()


def test_only_the_servers_user_can_connect_to_a_socket_in_a_folder(config):
    before = os.umask(0)
    try:
        service = EventService(config, description_of(config))
    finally:
        os.umask(before)
    path = Path(config.endpoint.removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    service.close()


def test_endpoints_of_the_command_line():
    assert check_endpoint("localhost:5659") == "tcp://localhost:5659"
    assert check_endpoint("ipc:///tmp/x") == "ipc:///tmp/x"
    with pytest.raises(ConfigError, match="got 'http://x:1'; allowed: tcp://HOST:PORT"):
        check_endpoint("http://x:1")


def test_batches_decode_to_typed_events():
    batch = EventBatch(7, 1.0, 2.0, [Cleared(), Split(1, 2, 3)], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch) == batch
    assert (batch.end, batch.since(8)) == (9, EventBatch(8, 1.0, 2.0, [Split(1, 2, 3)], 0))
