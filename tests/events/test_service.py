"""The thread that owns the event socket, without a tree."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from helpers.event_sockets import description_of, ipc_config, wait_until
from kvevict_tools.launcher import free_port
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.events.client import AT_ONCE, InspectClient, RequestFailedError, ServerSilentError, check_endpoint
from sgl_kvevict.events.questions import Describe, Description, Failure, NodeGone, Status, Tokens, TokensReport
from sgl_kvevict.events.service import MAX_WAITING_QUESTIONS, EventService


@pytest.fixture
def config(tmp_path):
    return ipc_config(tmp_path)


@pytest.fixture
def service(config):
    service = EventService(config, description_of(config))
    yield service
    service.close()


async def described(config: EventsConfig) -> Description:
    async with InspectClient(config.endpoint, timeout_s=300) as client:
        return await client.ask(Describe(), Description)


def test_description_is_answered_without_the_scheduler(config, service):
    assert asyncio.run(described(config)) == description_of(config)


def test_the_wire_format(config, service):
    """Frames of the client's own, an empty one and a msgpack map, both ways."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    dealer.connect(config.endpoint)
    dealer.send_multipart([b"ticket", b"", msgspec.msgpack.encode({"op": "tokens", "node": 3})])
    wait_until(lambda: bool(service._questions))
    for question in service.take_questions():
        service.answer(question, TokensReport(3, [5]))
    ticket, empty, payload = dealer.recv_multipart()
    assert (ticket, empty) == (b"ticket", b"")
    assert msgspec.msgpack.decode(payload) == {"type": "TokensReport", "node": 3, "token_ids": [5]}
    context.destroy(linger=0)


def test_a_client_that_does_not_read_costs_bounded_memory(monkeypatch, tmp_path):
    """Further answers to it are dropped, and others get theirs."""
    monkeypatch.setattr("sgl_kvevict.events.service.MAX_UNREAD_MESSAGES", 2)
    config = EventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}")
    service = EventService(config, description_of(config))
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.set_hwm(1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.connect(config.endpoint)
    for _ in range(100):
        deaf.send_multipart([b"", msgspec.msgpack.encode(Tokens(1))])
        wait_until(lambda: bool(service._questions))
        for question in service.take_questions():
            service.answer(question, TokensReport(1, list(range(100_000))))
        wait_until(lambda: not service._num_asked)  # sent, or dropped by the socket
    assert asyncio.run(described(config)) == description_of(config)
    received = 0
    deaf.setsockopt(zmq.RCVTIMEO, 500)
    with pytest.raises(zmq.Again):
        while True:
            received += len(deaf.recv_multipart()) == 2
    assert 0 < received < 100
    context.destroy(linger=0)
    service.close()
    service.close()


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


def test_a_refusal_a_failure_and_a_foreign_answer_are_errors(config, service):
    """A refusal of several questions, too, which is not a node that is gone."""

    async def ask(call, reply) -> None:
        async with InspectClient(config.endpoint, timeout_s=300) as client:
            asked = asyncio.ensure_future(call(client))
            while not asked.done():
                await asyncio.sleep(0.001)
                for question in service.take_questions():
                    service.answer(question, reply)
            await asked

    def one(client):
        return client.ask(Status(), TokensReport)

    for call, reply, error in (
        (lambda client: client.ask_each([Tokens(1), Tokens(2)], TokensReport), Failure("busy"), "busy"),
        (one, Failure("no such thing"), "no such thing"),
        (one, description_of(config), "expected TokensReport, got Description"),
    ):
        with pytest.raises(RequestFailedError, match=error):
            asyncio.run(ask(call, reply))


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
