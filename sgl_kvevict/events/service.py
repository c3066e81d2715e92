"""One thread that owns the event and inspection sockets; bounded queues connect it to the scheduler.

The scheduler never waits. The thread encodes everything and sends the events of up to 50 ms in one message. SGLang's
``ZmqEventPublisher`` blocks when its queue is full, sends one message per call and serves no questions.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import NamedTuple

import msgspec
import zmq

from sgl_kvevict.config import EventsConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.events.questions import AnyReply, AnyRequest, Describe, Description, Failure
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.events.types import END_OF_REPLAY, AnyEvent, EventBatch, EventsLost
from sgl_kvevict.guard import Guard, Place

MAX_REQUEST_BYTES = 65536
MAX_WAITING_QUESTIONS = 64
MAX_BATCH_EVENTS = 4096
_TICK_MS = 50
_TICK_WHILE_ASKED_MS = 5


class Question(NamedTuple):
    """A valid request, and the ZeroMQ frames that route its answer."""

    envelope: list[bytes]
    request: AnyRequest


class EventService:
    """Serves the configured sockets from a thread; :class:`ConfigError` lists all addresses that cannot be bound.

    Args:
        description: answers :class:`~sgl_kvevict.events.questions.Describe`.
        rank: data-parallel rank, in every batch.
        guard: catches errors of single messages.
        totals: counts lost events.
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
        self._description = description
        self._rank = rank
        self._guard = guard or Guard()
        self._events: deque[AnyEvent] = deque()
        self._questions: deque[Question] = deque()
        self._answers: deque[tuple[list[bytes], AnyReply]] = deque()
        self._num_asked = 0
        self._lost_before = 0
        self._next_seq = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
        self._context = zmq.Context()
        self._pub, self._replay, self._inspect = self._bind_all()
        self._closing = False
        self._thread = Thread(target=self._run, daemon=True, name="kvevict-events")
        self._thread.start()
        atexit.register(self.close)

    # ---- called by the scheduler ----------------------------------------------------------------------------

    def publish(self, event: AnyEvent) -> None:
        """Queue an event, or count it as lost if the queue is full. Never waits."""
        if len(self._events) < self.config.max_queue_size:
            self._events.append(event)
        else:
            self.totals.lost_events += 1

    def take_questions(self) -> Iterator[Question]:
        """Iterate over the questions asked since the last call."""
        while self._questions:
            yield self._questions.popleft()

    def answer(self, question: Question, reply: AnyReply) -> None:
        """Queue the answer to a question; the thread encodes and sends it."""
        self._answers.append((question.envelope, reply))

    def close(self) -> None:
        """Publish queued events and release the sockets. Safe to call twice."""
        atexit.unregister(self.close)
        self._closing = True
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._context.destroy(linger=200)  # ms to send what is queued for subscribers

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._replay, self._inspect):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while not self._closing:
            if not poller.sockets:
                time.sleep(_TICK_MS / 1e3)  # poll without sockets returns at once
            ready = dict(poller.poll(_TICK_WHILE_ASKED_MS if self._num_asked else _TICK_MS))
            if self._replay is not None and self._replay in ready:
                self._guarded(partial(self._serve_replay, self._replay))
            if self._inspect is not None and self._inspect in ready:
                self._guarded(partial(self._receive_questions, self._inspect))
            self._guarded(self._publish_queued)
            self._guarded(self._send_answers)
        self._guarded(self._publish_queued)

    def _guarded(self, serve: Callable[[], None]) -> None:
        with self._guard.at(Place.SOCKETS):
            serve()

    def _publish_queued(self) -> None:
        while self._events or self.totals.lost_events != self._lost_before:
            events = [self._events.popleft() for _ in range(min(len(self._events), MAX_BATCH_EVENTS))]
            lost = self.totals.lost_events
            if lost != self._lost_before:
                events.append(EventsLost(lost - self._lost_before))
                self._lost_before = lost
            payload = self._encoder.encode(EventBatch(time.time(), events, self._rank))
            if self._pub is not None:
                self._pub.send_multipart((self._topic, self._next_seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._sent.append((self._next_seq, payload))
            self._next_seq += 1

    @property
    def _topic(self) -> bytes:
        return self.config.topic.encode()

    def _serve_replay(self, socket: zmq.Socket[bytes]) -> None:
        """Send all batches from a sequence number on, then an end mark, which carries the error if there is one."""
        client, *frames = socket.recv_multipart()
        if len(frames) != 2 or len(frames[-1]) != 8:
            error = "a replay request is an empty frame and a sequence number of 8 bytes, big-endian"
            failure = self._encoder.encode(Failure(error))
            self._send(socket, [client, b"", self._topic, END_OF_REPLAY, failure])
            return
        start = int.from_bytes(frames[1], "big")
        for seq, payload in self._sent:
            if seq >= start:
                self._send(socket, [client, b"", self._topic, seq.to_bytes(8, "big"), payload])
        self._send(socket, [client, b"", self._topic, END_OF_REPLAY, b""])

    def _receive_questions(self, socket: zmq.Socket[bytes]) -> None:
        *envelope, payload = socket.recv_multipart()
        try:
            request = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._send(socket, [*envelope, self._encoder.encode(Failure(f"not a request: {error}"))])
            return
        if isinstance(request, Describe):
            description = msgspec.structs.replace(self._description, next_seq=self._next_seq)
            self._send(socket, [*envelope, self._encoder.encode(description)])
        elif len(self._questions) >= MAX_WAITING_QUESTIONS:
            failure = Failure(f"busy: {MAX_WAITING_QUESTIONS} questions wait already")
            self._send(socket, [*envelope, self._encoder.encode(failure)])
        else:
            self._questions.append(Question(envelope, request))
            self._num_asked += 1

    def _send_answers(self) -> None:
        while self._answers and self._inspect is not None:
            envelope, reply = self._answers.popleft()
            self._num_asked -= 1
            self._send(self._inspect, [*envelope, self._encoder.encode(reply)])

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Send without waiting; the answer is lost if the client left or does not read."""
        with self._guard.at(Place.SOCKETS):
            socket.send_multipart(frames, zmq.NOBLOCK)

    # ---- sockets --------------------------------------------------------------------------------------------

    def _bind_all(self) -> tuple[zmq.Socket[bytes] | None, zmq.Socket[bytes] | None, zmq.Socket[bytes] | None]:
        wanted = (
            ("events.endpoint", self.config.endpoint, zmq.PUB),
            ("events.replay_endpoint", self.config.replay_endpoint, zmq.ROUTER),
            ("events.inspect_endpoint", self.config.inspect_endpoint, zmq.ROUTER),
        )
        sockets: list[zmq.Socket[bytes] | None] = []
        problems = []
        for name, endpoint, kind in wanted:
            if endpoint is None:
                sockets.append(None)
                continue
            socket = self._context.socket(kind)
            socket.set_hwm(max(self.config.hwm, self.config.buffer_steps + 1))
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            socket.setsockopt(zmq.LINGER, 0)
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                problems.append(f"{name}: {endpoint!r} cannot be bound ({error}); allowed: a free address")
            sockets.append(socket)
        if problems:
            self._context.destroy(linger=0)
            raise ConfigError("\n".join(problems))
        pub, replay, inspect = sockets
        return pub, replay, inspect
