"""A server's events while a benchmark drives it, with their moments on the benchmark's clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sgl_kvevict.events.client import InspectClient
from sgl_kvevict.events.types import AnyEvent, EventBatch

ANSWERS_S = 60.0
"""A server answers between two steps; events are followed from its first answer on."""


class Watch:
    """Collects events.

    Attributes:
        events: (seconds on the clock of ``time.perf_counter``, event), oldest first; more may come at any time.
        follows: set once the server sends events.
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, AnyEvent]] = []
        self.follows = threading.Event()

    def count(self, kind: type[AnyEvent]) -> int:
        """Events of a kind so far."""
        return sum(isinstance(event, kind) for _, event in self.events)

    def first(self, kind: type[AnyEvent]) -> float | None:
        """When the first event of a kind was published; None if there was none."""
        return next((moment for moment, event in self.events if isinstance(event, kind)), None)

    async def collect(self, endpoint: str) -> None:
        """Collect until cancelled."""
        async with InspectClient(endpoint, timeout_s=ANSWERS_S) as client:
            async for part in client.follow():
                if isinstance(part, EventBatch):
                    moment = part.ts - time.time() + time.perf_counter()
                    self.events += [(moment, event) for event in part.events]
                self.follows.set()


@contextmanager
def watching(endpoint: str) -> Iterator[Watch]:
    """Collect a server's events while the block runs.

    Args:
        endpoint: the server's ``events.endpoint``.
    """
    watch, loop = Watch(), asyncio.new_event_loop()
    task = loop.create_task(watch.collect(endpoint))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not watch.follows.wait(ANSWERS_S):
        raise RuntimeError(f"no answer from {endpoint}")
    try:
        yield watch
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
