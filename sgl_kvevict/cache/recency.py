"""The order in which prefixes shrink or are dropped when token slots are short."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from sgl_kvevict.cache.nodes import Node, NodeSet
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.segments.segment import Segment

MAX_LEVELS = 1024
"""Remembered levels; a node that was last used before the oldest one counts as used then."""
SPARE_ENTRIES = 64
"""A heap is rebuilt if it has more than two entries for each node, and these beside: most of them are out of date."""

MS = 1000
"""Milliseconds of a second."""
LOSS_OF_LOADING = 0.03
"""Loss of dropping a prefix that comes back from the host's memory, relative to computing it again."""

Priority = tuple[float, float]
"""(credit, number of the last access); the smallest goes first. Of a retained prefix the number is infinity."""


class CostAwareRecency:
    """Recency, weighed by the loss per token slot released, in tokens of prefill; spoiled answers count as such, too.

    A compressed prefix of 1,000 tokens in 200 slots saves five tokens a slot, the last question below it one. Plain
    recency would drop the prefix to keep questions that are not asked again. Here a node's credit is the level at its
    last access plus the loss per slot released. The level rises to the credit of each node that shrinks or is dropped.
    Where all leaves save the same (a budget of 1.0) this is plain recency.

    Source: GreedyDual-Size (Cao and Irani, USENIX Symposium on Internet Technologies and Systems 1997), Sec. 4.
    Differs: a prefix shrinks in steps before it is dropped, each with a loss of its own.

    A retained prefix counts as used until its time has come: its credit rises with the level until then, and of nodes
    with the same credit it goes last. Nothing is kept from others: what is worth more a slot stays longer all the same.

    ``clock`` gives the number of the last access, as nodes note it. ``now``: milliseconds, the same on all ranks.
    ``state_slots`` gives the memory of a node's recurrent state in token slots, None if the node has none; it is None
    for models without recurrent layers.

    Attributes:
        has_host_room: whether a segment would be in the host's memory once it was dropped.
    """

    def __init__(
        self,
        table: PrefixTable,
        clock: Callable[[], float],
        now: Callable[[], int],
        state_slots: Callable[[Node], float | None] | None = None,
    ) -> None:
        self.has_host_room: Callable[[Segment], bool] = lambda segment: False
        self._state_slots = state_slots
        self._table = table
        self._spans = table.spans
        self._clock = clock
        self._read_now = now
        self._now = self._last_end = 0
        self._times: list[float] = []
        self._moments: list[int] = []
        self._levels: list[float] = [0.0]

    def get_priority(self, node: Node) -> Priority:
        """Priority of dropping a leaf; grows when the leaf is used."""
        if self._state_slots is not None:
            return self.priority(node, self._loss_of_state(node, self._state_slots))
        comes_back = node in self._spans and self.has_host_room(self._spans[node].segment)
        return self.priority(node, self.saved(node) * (LOSS_OF_LOADING if comes_back else 1.0))

    def _loss_of_state(self, node: Node, state_slots: Callable[[Node], float | None]) -> float:
        """Tokens of prefill that a leaf's state saves, per slot released with it; a prompt is found only at a state.

        Dropping a leaf without a state loses nothing: no prompt matches it. Dropping a state loses the tokens since the
        state above it; it releases the state's memory and the slots of nodes that only this leaf needs. Steps in which
        a segment shrinks lose the same as without states, because the state stays. A priority falls when a state is
        inserted above the leaf's. :class:`NodeHeap` notices only when the leaf reaches its top, so the leaf may be
        dropped late.
        """
        tokens, slots, is_alone = 0, state_slots(node), True
        if slots is None:
            return 0.0
        while True:
            tokens += len(node.key)
            if is_alone:
                slots += self._spans[node].charged_slots if node in self._spans else len(node.key)
            above = node.parent
            if above is None or above.parent is None or state_slots(above) is not None:
                return tokens / slots
            is_alone = is_alone and len(above.children) == 1
            node = above

    def loss_below_budget(self, segment: Segment, loss: float) -> float:
        """Loss per slot released of a step below the budget that by itself loses ``loss``.

        If the segment would come back from the host's memory as it is, it is better to drop it: the step would spoil
        answers until the segment grows. So the step counts as at least the loss of dropping first an uncompressed leaf
        below the segment, which saves one token a slot, and then the segment.
        """
        if not self.has_host_room(segment):
            return loss
        return max(loss, 1.0 + LOSS_OF_LOADING * segment.tokens_per_slot)

    def raise_level(self, priority: Priority) -> None:
        """Raise the level to the credit of a node that shrank or was dropped."""
        if priority[0] <= self._levels[-1]:
            return
        if self._now < self._last_end:  # ranks exchange the time only while it matters
            self._now = self._read_now()
        # Times, moments and levels only rise, so a node's level is found by halving.
        self._times.append(self._clock())
        self._moments.append(self._now)
        self._levels.append(priority[0])
        if len(self._times) > MAX_LEVELS:
            del self._times[0], self._moments[0], self._levels[0]

    def retain(self, path: Sequence[Node], num_tokens: int, seconds: float) -> None:
        """Let those nodes of a path that begin before ``num_tokens`` count as used for so long from now on."""
        self._now = self._read_now()
        until, start = self._now + int(seconds * MS), 0
        self._last_end = max(self._last_end, until)
        for node in path:
            if start < num_tokens:
                self._table.retained[node] = max(self._table.retained.get(node, 0), until)
            start += len(node.key)

    def saved(self, node: Node) -> float:
        """Tokens of prefill that each slot of a node saves."""
        return self._spans[node].segment.tokens_per_slot if node in self._spans else 1.0

    def priority(self, node: Node, loss: float) -> Priority:
        """Priority of a step that loses ``loss`` tokens of prefill, or as many in answers, per slot released."""
        accessed, until = node.last_access_time, self._table.retained.get(node, 0)
        used = bisect_right(self._times, accessed)
        if until and (kept := bisect_right(self._moments, until)) >= used:
            return self._levels[kept] + loss, math.inf
        return self._levels[used] + loss, accessed


class NodeHeap:
    """Nodes by priority, kept between evictions, so that an eviction takes a few steps however many nodes wait.

    A node that is used keeps its place; its priority is computed again when it reaches the top. The owner of ``nodes``
    keeps the set up to date. The ``priority`` of a node in it only grows.
    """

    def __init__(self, nodes: NodeSet, priority: Callable[[Node], Priority]) -> None:
        self._nodes = nodes
        self._priority = priority
        self._heap: list[tuple[Priority, int, Node]] = []

    def top(self) -> tuple[Priority, Node] | None:
        """Return the smallest priority and its node; None if the heap is empty."""
        self._add_new()
        heap, nodes = self._heap, self._nodes
        while heap:
            priority, number, node = heap[0]
            if node not in nodes:
                heapq.heappop(heap)
                continue
            current = self._priority(node)
            # Priorities only grow, so stored ones are lower bounds: one that still holds at the top is the smallest.
            if current == priority:
                return priority, node
            heapq.heapreplace(heap, (current, number, node))
        return None

    def pop(self) -> Node | None:
        """Remove and return the node of smallest priority; None if the heap is empty."""
        top = self.top()
        if top is None:
            return None
        heapq.heappop(self._heap)
        return top[1]

    def push(self, node: Node) -> None:
        """Add a node, or put it back."""
        heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[Priority, int, Node]:
        return self._priority(node), node.id, node

    def _add_new(self) -> None:
        new = self._nodes.take_new()
        if len(self._heap) + len(new) > 2 * len(self._nodes) + SPARE_ENTRIES:
            self._heap = [self._entry(node) for node in self._nodes]
            heapq.heapify(self._heap)
            return
        for node in new:
            if node in self._nodes:
                self.push(node)
