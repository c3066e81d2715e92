"""Layouts of batches, kept while the same requests read the same spans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_BATCHES = 2
"""A server alternates between at most two recurring batches: decode steps, and decode rows inside prefill steps."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentBatches(Generic[K, V]):
    """Keeps the layouts of the ``MAX_BATCHES`` most recently used batches.

    ``on_drop`` releases a dropped layout's resources; it is called before the new layout is built.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._on_drop = on_drop
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return the layout of a batch; if it is not kept, drop the least recently used one and ``build`` it."""
        value = self._kept.pop(key, None)
        if value is None:
            if len(self._kept) == MAX_BATCHES:
                _, oldest = self._kept.popitem(last=False)
                if self._on_drop is not None:
                    self._on_drop(oldest)
            value = build()
        self._kept[key] = value
        return value
