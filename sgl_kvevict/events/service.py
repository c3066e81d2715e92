"""One thread that owns the event socket. The scheduler takes questions from a bounded queue, and never waits."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Iterator
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
from sgl_kvevict.events.questions import AnyReply, AnyRequest, Describe, Description, Failure
from sgl_kvevict.guard import Guard, Place

MAX_REQUEST_BYTES = 65536
MAX_WAITING_QUESTIONS = 64
MAX_UNREAD_MESSAGES = 256
"""Answers that wait for one client; it does not get further ones."""
_TICK_MS = 50
_TICK_WHILE_ASKED_MS = 5


class Question(NamedTuple):
    """A valid request, and the ZeroMQ frames that route its answer."""

    envelope: list[bytes]
    request: AnyRequest


class EventService:
    """Serves the configured socket from a thread; :class:`ConfigError` if its address cannot be bound.

    ``description`` answers :class:`~sgl_kvevict.events.questions.Describe`; ``guard`` catches errors of one message.
    """

    def __init__(self, config: EventsConfig, description: Description, guard: Guard | None = None) -> None:
        self.config = config
        self._description = description
        self._guard = guard or Guard()
        self._questions: deque[Question] = deque()
        self._answers: deque[tuple[list[bytes], AnyReply]] = deque()
        self._num_asked = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
        self._context = zmq.Context()
        self._socket = self._bind()
        self._closing = False
        self._thread = Thread(target=self._run, daemon=True, name="kvevict-events")
        self._thread.start()
        # A context that is destroyed by the interpreter's end would wait for the thread's socket.
        atexit.register(self.close)

    # ---- called by the scheduler ----------------------------------------------------------------------------

    def take_questions(self) -> Iterator[Question]:
        """Iterate over waiting questions; it may never end, because others are asked meanwhile."""
        while self._questions:
            yield self._questions.popleft()

    def answer(self, question: Question, reply: AnyReply) -> None:
        """Queue the answer to a question; the thread encodes and sends it."""
        self._answers.append((question.envelope, reply))

    def close(self) -> None:
        """Release the socket. Safe to call twice."""
        atexit.unregister(self.close)
        self._closing = True
        self._thread.join(timeout=2.0)
        # A socket must not be closed under a thread that uses it; the process ends anyway.
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            # Answers come from another thread, which cannot wake this poll: it looks more often while one is due.
            if self._socket.poll(_TICK_WHILE_ASKED_MS if self._num_asked else _TICK_MS):
                with self._guard.at(Place.SOCKETS):
                    self._receive_question()
            with self._guard.at(Place.SOCKETS):
                self._send_answers()

    def _receive_question(self) -> None:
        *envelope, payload = self._socket.recv_multipart()
        try:
            request = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._reply(envelope, Failure(f"not a request: {error}"))
            return
        if isinstance(request, Describe):
            # Answered here: it needs nothing of the tree, and the scheduler may be busy.
            self._reply(envelope, self._description)
        elif len(self._questions) >= MAX_WAITING_QUESTIONS:
            self._reply(envelope, Failure(f"busy: {MAX_WAITING_QUESTIONS} questions wait already"))
        else:
            self._questions.append(Question(envelope, request))
            self._num_asked += 1

    def _send_answers(self) -> None:
        while self._answers:
            envelope, reply = self._answers.popleft()
            self._num_asked -= 1
            self._reply(envelope, reply)

    def _reply(self, envelope: list[bytes], reply: AnyReply) -> None:
        """Send without waiting; the answer is lost if the client left or does not read."""
        self._socket.send_multipart([*envelope, self._encoder.encode(reply)], zmq.NOBLOCK)

    def _bind(self) -> zmq.Socket[bytes]:
        socket, endpoint = self._context.socket(zmq.ROUTER), self.config.endpoint
        socket.set_hwm(MAX_UNREAD_MESSAGES)
        # ZeroMQ drops the connection of a client that sends more, before it is read into memory.
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
