"""An asynchronous client of the event socket: asks questions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.events.questions import AnyReply, AnyRequest, Failure, NodeGone, Reply

ReplyT = TypeVar("ReplyT", bound=Reply)

AT_ONCE = 16
"""Maximum number of questions of one client in flight; the server answers all waiting ones between two steps."""

_TCP = re.compile(r"^tcp://(?P<host>\[[^\]]*\]|[^:]+):(?P<port>[0-9]+)$")


class ServerSilentError(KVEvictError):
    """No answer in time: the server is down, busy, or listens elsewhere."""


class RequestFailedError(KVEvictError):
    """The server refused the request, or its answer was invalid."""


class NodeGoneError(RequestFailedError):
    """The requested node has left the tree."""


def check_endpoint(endpoint: str) -> str:
    """Return an address to connect to; ``HOST:PORT`` is taken as TCP. Raises :class:`ConfigError` if invalid."""
    address = endpoint if "://" in endpoint else f"tcp://{endpoint}"
    tcp = _TCP.match(address)
    if not (0 < int(tcp["port"]) < 2**16 if tcp else re.match("ipc://.", address)):
        raise ConfigError(f"endpoint: got {endpoint!r}; allowed: tcp://HOST:PORT, HOST:PORT or ipc://PATH")
    return address


class InspectClient:
    """Asks the scheduler at an ``events.endpoint``; an asynchronous context manager that reconnects by itself.

    Use it for one call at a time.
    """

    def __init__(self, endpoint: str, timeout_s: float = 5.0) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s  # for up to AT_ONCE answers
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._num_asked = 0
        # A server that is down would hold the end of the program with unsent questions.
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"endpoint: got {endpoint!r}: {error}") from error
        self._decoder: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    async def ask(self, request: AnyRequest, answer: type[ReplyT]) -> ReplyT:
        """Return the reply, of type ``answer``, to a question; ServerSilentError: none came in time.

        RequestFailedError: the server refused, or sent something else; :class:`NodeGoneError` if the node is gone.
        """
        (payload,) = await self._payloads([request])
        return self._reply(payload, answer)

    async def ask_each(self, requests: Sequence[AnyRequest], answer: type[ReplyT]) -> list[ReplyT | None]:
        """Ask questions, ``AT_ONCE`` at a time: a sleeping server wakes once a second to answer.

        The replies are in order, None if the node is gone. Other errors are raised as in :meth:`ask`.
        """
        replies: list[ReplyT | None] = []
        for begin in range(0, len(requests), AT_ONCE):
            for payload in await self._payloads(requests[begin : begin + AT_ONCE]):
                try:
                    replies.append(self._reply(payload, answer))
                except NodeGoneError:
                    replies.append(None)
        return replies

    async def _payloads(self, requests: Sequence[AnyRequest]) -> list[bytes]:
        """Answers in the order of the questions; late answers to earlier questions are skipped."""
        tickets = [(self._num_asked + i).to_bytes(8, "big") for i in range(len(requests))]
        self._num_asked += len(requests)
        for ticket, request in zip(tickets, requests, strict=True):
            await self._socket.send_multipart((ticket, b"", msgspec.msgpack.encode(request)))
        missing, payloads = set(tickets), dict.fromkeys(tickets, b"")
        try:
            async with asyncio.timeout(self.timeout_s):
                while missing:
                    frames: list[bytes] = await self._socket.recv_multipart()
                    # A question that was given up may be answered late.
                    if frames[0] in missing:
                        missing.remove(frames[0])
                        payloads[frames[0]] = frames[-1]
        except TimeoutError:
            message = f"no answer from {self.endpoint} within {self.timeout_s:g} s (serve --events opens this socket)"
            raise ServerSilentError(message) from None
        return list(payloads.values())

    def _reply(self, payload: bytes, answer: type[ReplyT]) -> ReplyT:
        try:
            reply = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise RequestFailedError(f"{self.endpoint} does not speak our protocol: {error}") from error
        if isinstance(reply, NodeGone):
            raise NodeGoneError(reply.error)
        if isinstance(reply, Failure):
            raise RequestFailedError(reply.error)
        if not isinstance(reply, answer):
            raise RequestFailedError(f"expected {answer.__name__}, got {type(reply).__name__}")
        return reply
