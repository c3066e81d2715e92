"""What is built once per composition of a batch, and kept while the composition comes again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_COMPOSITIONS = 2
"""A server alternates between at most two that come again: decode steps, and decode rows inside of prefill steps."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentCompositions(Generic[K, V]):
    """Keeps what was built for the ``MAX_COMPOSITIONS`` compositions used last.

    Args:
        on_drop: takes back what a dropped value holds; called before the value in its place is built.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._on_drop = on_drop
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return what was built for a composition.

        Args:
            key: the composition.
            build: makes the value, which is not None; called if none is kept, after the one used longest ago has
                made room.
        """
        value = self._kept.pop(key, None)
        if value is None:
            if len(self._kept) == MAX_COMPOSITIONS:
                _, oldest = self._kept.popitem(last=False)
                if self._on_drop is not None:
                    self._on_drop(oldest)
            value = build()
        self._kept[key] = value
        return value
