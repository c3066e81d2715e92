"""Malformed input on the event socket is answered with an error, or ignored, and harms nobody."""

from __future__ import annotations

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.event_sockets import description_of
from kvevict_tools.launcher import free_port
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.questions import AnyRequest, Describe, Description, Failure
from sgl_kvevict.events.service import MAX_REQUEST_BYTES, EventService

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**63) | st.floats() | st.text(max_size=8) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
almost_requests = st.fixed_dictionaries(
    {"op": st.sampled_from(["describe", "status", "tree", "kept", "tokens", "kill", ""]) | plain},
    optional={"limit": plain, "node": plain, "bins": plain, "sort": plain, "more": plain},
)
payloads = st.binary(max_size=200) | plain.map(msgspec.msgpack.encode) | almost_requests.map(msgspec.msgpack.encode)


@pytest.fixture(scope="module")
def config() -> EventsConfig:
    return EventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def service(config):
    service = EventService(config, description_of(config))
    yield service
    service.close()


@pytest.fixture(scope="module")
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.RCVTIMEO, 10_000)
    client.connect(endpoint)
    return client


def is_well(context: zmq.Context, config: EventsConfig) -> bool:
    client = dealer(context, config.endpoint)
    client.send_multipart([b"", msgspec.msgpack.encode(Describe())])
    reply = msgspec.msgpack.decode(client.recv_multipart()[-1], type=Description)
    client.close()
    return reply.policy == "pseudo-random"


def is_valid(payload: bytes) -> bool:
    try:
        msgspec.msgpack.decode(payload, type=AnyRequest)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


@FUZZ
@given(envelope=st.lists(st.binary(max_size=10), max_size=5), payload=payloads)
def test_whatever_is_asked_is_answered(envelope, payload, config, service, context):
    client = dealer(context, config.endpoint)
    client.send_multipart([*envelope, payload])
    if is_valid(payload):  # by chance: the scheduler's answer stands in
        for question in service.take_questions():
            service.answer(question, Failure("valid"))
    else:
        *returned, reply = client.recv_multipart()
        assert returned == envelope
        assert msgspec.msgpack.decode(reply, type=Failure).error.startswith("not a request: ")
    client.close()
    assert is_well(context, config)


def test_deep_and_huge_messages(config, service, context):
    client = dealer(context, config.endpoint)
    client.send_multipart([b"", b"\x91" * 60_000])
    assert "not a request" in msgspec.msgpack.decode(client.recv_multipart()[-1], type=Failure).error
    client.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])  # the connection is closed, nothing is read
    client.setsockopt(zmq.RCVTIMEO, 300)
    with pytest.raises(zmq.Again):
        client.recv_multipart()
    client.close()
    assert is_well(context, config)


def test_clients_that_leave_without_their_answer(config, service, context):
    for _ in range(20):
        client = dealer(context, config.endpoint)
        client.send_multipart([b"", msgspec.msgpack.encode({"op": "status"})])
        client.close(linger=0)
        for question in service.take_questions():
            service.answer(question, Failure("valid"))
    assert is_well(context, config)
