"""The stream beside the scheduler's on which entries are chosen on a GPU, so that forwards need not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """A CUDA stream beside the scheduler's, for work that reads the arena and writes only what it allocates.

    The host waits for work where its result is called: an order is checked before entries move by it. That is two turns
    after the launch, when the work is done, or earlier if slots are short.

    Memory needs no ``record_stream``. Inputs are kept until the work was seen to be done. What work allocates belongs
    to this stream's pool. It is given out again only to later work, which waits for the scheduler's stream, and so for
    the last use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: list[tuple[torch.cuda.Event, Callable[[], object]]] = []

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        """Launch work behind everything that the scheduler's stream has; the result, once called, is done."""
        self._forget_done()
        # Keys and values of the range were written by forwards that this stream has not seen.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                value = work()
        finally:
            # Also after an error: kernels that were launched before it still read their inputs.
            done.record(self._stream)
            self._running.append((done, work))

        def result() -> T:
            done.synchronize()
            self._forget_done()
            return value

        return result

    def _forget_done(self) -> None:
        self._running = [one for one in self._running if not one[0].query()]  # type: ignore[no-untyped-call]
