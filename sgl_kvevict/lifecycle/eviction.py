"""Which leaf goes first when token slots are short."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.prefix import Span

MAX_LEVELS = 1024
"""Levels that are remembered; nodes that were used before the first of them count as used then."""
SPARE_ENTRIES = 64
"""A heap is built anew when it has more than this beside two entries per leaf: the others are out of date."""

Priority = tuple[float, float]
"""(credit, number of the last access); the smallest goes first."""


class Leaf(Node, Protocol):
    """A node that knows when it was used."""

    @property
    def last_access_time(self) -> float:
        """Number of its last access."""


class CostAwareRecency:
    """Recency, weighed by what a token slot saves: the tokens of prefill that dropping it would cost.

    A compressed prefix of 1,000 tokens in 200 slots saves five tokens a slot, the last question below it one. Plain
    recency drops the prefix to keep questions that nobody asks again. Here a leaf's credit is the level at its last
    access plus the tokens per slot that it saves, and the level rises to the credit of what was dropped last: what
    saves little goes first, and what saves much goes too once it was left alone for long enough. Where all leaves save
    the same (a budget of 1.0) this is plain recency.

    Source: GreedyDual-Size (Cao and Irani, USENIX Symposium on Internet Technologies and Systems 1997), Sec. 4.

    Args:
        spans: what compressed nodes hold.
        clock: numbers accesses, in the order in which nodes note theirs.
    """

    def __init__(self, spans: Mapping[Node, Span], clock: Callable[[], float]) -> None:
        self._spans = spans
        self._clock = clock
        self._times: list[float] = []
        self._levels: list[float] = [0.0]

    def get_priority(self, node: Leaf) -> Priority:
        """Priority of a leaf; grows when the leaf is used."""
        accessed = node.last_access_time
        spans = self._spans
        saved = spans[node].segment.tokens_per_slot if node in spans else 1.0
        return self._levels[bisect_right(self._times, accessed)] + saved, accessed

    def dropped(self, priority: Priority) -> None:
        """A leaf of this priority went: raise the level to its credit."""
        if priority[0] <= self._levels[-1]:
            return
        self._times.append(self._clock())
        self._levels.append(priority[0])
        if len(self._times) > MAX_LEVELS:
            del self._times[0], self._levels[0]


class LeafSet(set[Leaf]):
    """Leaves that may go, and which of them are new since somebody asked.

    Args:
        leaves: those that there are.
    """

    def __init__(self, leaves: Iterable[Leaf] = ()) -> None:
        super().__init__(leaves)
        self._new: dict[Leaf, None] = dict.fromkeys(self)

    def add(self, leaf: Leaf) -> None:
        """A node may go."""
        if leaf not in self:
            super().add(leaf)
            self._new[leaf] = None

    def take_new(self) -> list[Leaf]:
        """Leaves that came since the last call, in the order in which they did; some may have left again."""
        new, self._new = list(self._new), {}
        return new


class LeafHeap:
    """The leaves by priority, kept from one eviction to the next: each costs a few steps, however many leaves wait.

    A leaf that is used stays where it is; its priority is looked up again when it comes to the top.

    Args:
        leaves: which may go; kept up to date by the tree.
        order: whose priorities. They only grow while a leaf stays one.
    """

    def __init__(self, leaves: LeafSet, order: CostAwareRecency) -> None:
        self._leaves = leaves
        self._order = order
        self._heap: list[tuple[Priority, int, Leaf]] = []

    def pop(self) -> Leaf | None:
        """Take out the leaf that goes next; None if there is none."""
        self._add_new()
        heap, leaves = self._heap, self._leaves
        while heap:
            priority, number, leaf = heap[0]
            if leaf not in leaves:
                heapq.heappop(heap)
                continue
            current = self._order.get_priority(leaf)
            if current == priority:
                heapq.heappop(heap)
                return leaf
            heapq.heapreplace(heap, (current, number, leaf))
        return None

    def push(self, leaf: Leaf) -> None:
        """Put a leaf in, or back."""
        heapq.heappush(self._heap, self._entry(leaf))

    def _entry(self, leaf: Leaf) -> tuple[Priority, int, Leaf]:
        return self._order.get_priority(leaf), leaf.id, leaf

    def _add_new(self) -> None:
        new = self._leaves.take_new()
        if len(self._heap) + len(new) > 2 * len(self._leaves) + SPARE_ENTRIES:
            self._heap = [self._entry(leaf) for leaf in self._leaves]
            heapq.heapify(self._heap)
            return
        for leaf in new:
            if leaf in self._leaves:
                self.push(leaf)
