"""One thread that owns the event socket; bounded queues connect it to the scheduler.

A client asks questions and may follow: then it gets every event after its answer, numbered, and sees by the numbers if
some are missing. The scheduler never waits. The thread encodes everything, and sends the events of up to 50 ms in one
message.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import AF_UNIX
from socket import socket as unix_socket
from stat import S_ISSOCK
from threading import Thread
from typing import NamedTuple

import msgspec
import zmq

from sgl_kvevict.config import EventsConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.events.questions import AnyReply, AnyRequest, Describe, Description, Failure, Status
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.events.types import FOLLOW_S, AnyEvent, EventBatch
from sgl_kvevict.guard import Guard, Place

MAX_REQUEST_BYTES = 65536
MAX_WAITING_QUESTIONS = 64
MAX_FOLLOWERS = 16
MAX_BATCH_EVENTS = 512
MAX_UNREAD_MESSAGES = 256
"""Messages that wait for one client; of further ones it gets none, and sees a gap in the numbers of events."""
_TICK_MS = 50
_TICK_WHILE_ASKED_MS = 5


class Question(NamedTuple):
    """A valid request, and the ZeroMQ frames that route its answer."""

    envelope: list[bytes]
    request: AnyRequest


class EventService:
    """Serves the configured socket from a thread; :class:`ConfigError` if its address cannot be bound.

    Args:
        description: answers :class:`~sgl_kvevict.events.questions.Describe`.
        rank: data-parallel rank, in every batch.
        guard: catches errors of single messages.
        totals: counts lost events.

    Attributes:
        next_event: number of the next event; events are counted whether somebody follows or not.
    """

    def __init__(
        self,
        config: EventsConfig,
        description: Description,
        rank: int = 0,
        guard: Guard | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.config = config
        self.totals = totals or Totals()
        self.next_event = 0
        self._description = description
        self._rank = rank
        self._guard = guard or Guard()
        self._events: deque[tuple[int, AnyEvent]] = deque()
        self._questions: deque[Question] = deque()
        self._answers: deque[tuple[list[bytes], AnyReply]] = deque()
        self._num_asked = 0
        self._followers: dict[bytes, float] = {}  # by ZeroMQ's name of a connection: until when (`time.monotonic`)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
        self._context = zmq.Context()
        self._socket = self._bind()
        self._closing = False
        self._thread = Thread(target=self._run, daemon=True, name="kvevict-events")
        self._thread.start()
        atexit.register(self.close)

    # ---- called by the scheduler ----------------------------------------------------------------------------

    def publish(self, event: AnyEvent) -> None:
        """Number an event and queue it if somebody follows; count it as lost if the queue is full. Never waits."""
        number = self.next_event
        self.next_event += 1
        if not self._followers:
            return
        if len(self._events) < self.config.max_queue_size:
            self._events.append((number, event))
        else:
            self.totals.lost_events += 1

    def take_questions(self) -> Iterator[Question]:
        """Iterate over waiting questions; it may never end, because others are asked meanwhile."""
        while self._questions:
            yield self._questions.popleft()

    def answer(self, question: Question, reply: AnyReply) -> None:
        """Queue the answer to a question; the thread encodes and sends it."""
        self._answers.append((question.envelope, reply))

    def close(self) -> None:
        """Publish queued events and release the socket. Safe to call twice."""
        atexit.unregister(self.close)
        self._closing = True
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._context.destroy(linger=200)  # ms to send what is queued for followers

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            if self._socket.poll(_TICK_WHILE_ASKED_MS if self._num_asked else _TICK_MS):
                self._guarded(self._receive_question)
            self._guarded(self._publish_queued)
            self._guarded(self._send_answers)
        self._guarded(self._publish_queued)

    def _guarded(self, serve: Callable[[], None]) -> None:
        with self._guard.at(Place.SOCKETS):
            serve()

    def _publish_queued(self) -> None:
        """Send queued events to all followers, in batches of consecutive numbers."""
        now = time.monotonic()
        for follower in [name for name, until in self._followers.items() if until < now]:
            del self._followers[follower]
        while self._events:
            first, events = self._events[0][0], list[AnyEvent]()
            while self._events and len(events) < MAX_BATCH_EVENTS and self._events[0][0] == first + len(events):
                events.append(self._events.popleft()[1])
            batch = EventBatch(first, self._description.started, time.time(), events, self._rank)
            payload = self._encoder.encode(batch)
            for follower in self._followers:
                self._send([follower, b"", payload])

    def _receive_question(self) -> None:
        *envelope, payload = self._socket.recv_multipart()
        try:
            request = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._reply(envelope, Failure(f"not a request: {error}"))
            return
        if isinstance(request, Describe):
            self._reply(envelope, self._description)
        elif len(self._questions) >= MAX_WAITING_QUESTIONS:
            self._reply(envelope, Failure(f"busy: {MAX_WAITING_QUESTIONS} questions wait already"))
        elif isinstance(request, Status) and request.follow and not self._follow(envelope[0]):
            self._reply(envelope, Failure(f"busy: {MAX_FOLLOWERS} clients follow the events already"))
        else:
            self._questions.append(Question(envelope, request))
            self._num_asked += 1

    def _follow(self, client: bytes) -> bool:
        """Send events to a client from now on, before its question is answered; False if too many do."""
        if client not in self._followers and len(self._followers) >= MAX_FOLLOWERS:
            return False
        self._followers[client] = time.monotonic() + FOLLOW_S
        return True

    def _send_answers(self) -> None:
        while self._answers:
            envelope, reply = self._answers.popleft()
            self._publish_queued()  # events that a snapshot counts come before it: else a follower would miss them
            self._num_asked -= 1
            self._reply(envelope, reply)

    def _reply(self, envelope: list[bytes], reply: AnyReply) -> None:
        self._send([*envelope, self._encoder.encode(reply)])

    def _send(self, frames: list[bytes]) -> None:
        """Send without waiting; the message is lost if the client left or does not read."""
        with self._guard.at(Place.SOCKETS):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _bind(self) -> zmq.Socket[bytes]:
        socket, endpoint = self._context.socket(zmq.ROUTER), self.config.endpoint
        socket.set_hwm(MAX_UNREAD_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        scheme, path = endpoint.split("://", 1)
        is_file = scheme == "ipc" and path != "*" and not path.startswith("@")  # these have no place in a folder
        try:
            if is_file:
                _check_free(path)
            socket.bind(endpoint)
            if is_file:
                os.chmod(path, 0o600)  # whoever may write to it can connect
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            message = f"events.endpoint: {endpoint!r} cannot be bound ({error}); allowed: a free address"
            raise ConfigError(message) from error
        return socket


def _check_free(path: str) -> None:
    """Raise ``OSError`` if a server listens at a path, or a file has it: ZeroMQ would remove either to bind its own."""
    with suppress(FileNotFoundError), unix_socket(AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:  # nobody listens
            if S_ISSOCK(os.stat(path).st_mode):
                return
            raise OSError("it is no socket") from None
        raise OSError("a server listens there")
