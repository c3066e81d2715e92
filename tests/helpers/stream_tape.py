"""CUDA's streams and events without CUDA: a tape of what is launched where, in the order of the host's calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StreamTape(TorchDispatchMode):
    """Stands in for ``torch.cuda``'s streams; everything runs at once, and its stream is noted.

    An event is not done before ``is_done``. The host can wait for an event only, not for a stream: an attempt is an
    AttributeError.

    Attributes:
        entries: (stream or "host", what): a torch operator, "wait for STREAM", "record N", "wait for event N", or as
            noted.
        writes: (stream, storage) of each operator that wrote to memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.entries: list[tuple[str, str]] = []
        self.writes: list[tuple[str, int]] = []
        self.is_done = False
        self.scheduler, self.forward = TapeStream(self, "scheduler"), TapeStream(self, "forward")
        self._current = self.scheduler
        self._num_events = 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: TapeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: TapeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextlib.contextmanager
    def on(self, stream: TapeStream) -> Iterator[None]:
        """Launch on a stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def note(self, what: str) -> None:
        """Note something that is launched on the current stream."""
        self.entries.append((self._current.name, what))

    def noting(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that also notes its calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(what)
            return function(*args, **kwargs)

        return call

    def places(self, stream: str, what: str = "") -> list[int]:
        """Places on the tape of what a stream got."""
        return [i for i, (name, each) in enumerate(self.entries) if name == stream and what in each]

    def new_number(self) -> int:
        """The number of a new event."""
        self._num_events += 1
        return self._num_events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator, and what it writes to."""
        kwargs = kwargs or {}
        self.note(str(func))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.writes += [(self._current.name, x.untyped_storage().data_ptr()) for x in tree_leaves(value)]
        return func(*args, **kwargs)


class TapeStream:
    """A stream that has a name only."""

    def __init__(self, tape: StreamTape, name: str) -> None:
        self.name = name
        self._tape = tape

    def wait_stream(self, other: TapeStream) -> None:
        self._tape.entries.append((self.name, f"wait for {other.name}"))

    def wait_event(self, event: TapeEvent) -> None:
        assert event.is_recorded
        self._tape.entries.append((self.name, f"wait for event {event.number}"))


class TapeEvent:
    """An event that has a number."""

    def __init__(self, tape: StreamTape) -> None:
        self.number = tape.new_number()
        self.is_recorded = False
        self._tape = tape

    def record(self, stream: TapeStream) -> None:
        self.is_recorded = True
        self._tape.entries.append((stream.name, f"record {self.number}"))

    def synchronize(self) -> None:
        assert self.is_recorded
        self._tape.entries.append(("host", f"wait for event {self.number}"))

    def query(self) -> bool:
        return self._tape.is_done
