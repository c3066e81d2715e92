"""What is built once for a batch, and kept while the same requests go on reading the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_BATCHES = 2
"""A server alternates between at most two that come again: decode steps, and decode rows inside of prefill steps."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentBatches(Generic[K, V]):
    """Keeps what was built for the ``MAX_BATCHES`` batches used last.

    Args:
        on_drop: takes back what a dropped value holds; called before the value in its place is built.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._on_drop = on_drop
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return what was built for a batch.

        Args:
            key: what the batch shares with its next steps.
            build: makes the value, which is not None; called if none is kept, after the one used longest ago has
                made room.
        """
        value = self._kept.pop(key, None)
        if value is None:
            if len(self._kept) == MAX_BATCHES:
                _, oldest = self._kept.popitem(last=False)
                if self._on_drop is not None:
                    self._on_drop(oldest)
            value = build()
        self._kept[key] = value
        return value
