"""The order in which prefixes shrink or are dropped when token slots are short."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping

from sgl_kvevict.lifecycle.nodes import Node, NodeSet
from sgl_kvevict.prefix import Span

MAX_LEVELS = 1024
"""Levels that are remembered; nodes that were used before the first of them count as used then."""
SPARE_ENTRIES = 64
"""A heap is built anew when it has more than this beside two entries per leaf: the others are out of date."""

Priority = tuple[float, ...]
"""(credit, number of the last access), perhaps after what comes before both; the smallest goes first."""


class CostAwareRecency:
    """Recency, weighed by what a token slot costs: the tokens of prefill, or the answers, lost for it.

    A compressed prefix of 1,000 tokens in 200 slots saves five tokens a slot, the last question below it one. Plain
    recency drops the prefix to keep questions that are not asked again. Here a node's credit is the level at its last
    access plus the loss per slot released, and the level rises to the credit of each node that shrinks or is dropped.
    Where all leaves save the same (a budget of 1.0) this is plain recency.

    Source: GreedyDual-Size (Cao and Irani, USENIX Symposium on Internet Technologies and Systems 1997), Sec. 4.
    Differs: a prefix is compressed, squeezed and dropped in steps, each with a loss of its own.

    Args:
        spans: what compressed nodes hold.
        clock: numbers accesses, in the order in which nodes note theirs.
    """

    def __init__(self, spans: Mapping[Node, Span], clock: Callable[[], float]) -> None:
        self._spans = spans
        self._clock = clock
        self._times: list[float] = []
        self._levels: list[float] = [0.0]

    def get_priority(self, node: Node) -> Priority:
        """Priority of dropping a leaf; grows when the leaf is used."""
        return self.priority(node, self.saved(node))

    def gave_way(self, priority: Priority) -> None:
        """A node with this priority shrank or was dropped: raise the level to its credit."""
        if priority[0] <= self._levels[-1]:
            return
        self._times.append(self._clock())
        self._levels.append(priority[0])
        if len(self._times) > MAX_LEVELS:
            del self._times[0], self._levels[0]

    def saved(self, node: Node) -> float:
        """Tokens of prefill that each slot of a node saves."""
        return self._spans[node].segment.tokens_per_slot if node in self._spans else 1.0

    def priority(self, node: Node, loss: float) -> Priority:
        """Priority of a step that costs ``loss`` tokens of prefill, or what is worth as much, per slot won."""
        accessed = node.last_access_time
        return self._levels[bisect_right(self._times, accessed)] + loss, accessed


class StatefulRecency(CostAwareRecency):
    """The same for models with recurrent layers, where a prompt is found only at a node that holds their state.

    Dropping a leaf without a state loses nothing: no prompt matches it. Dropping a state loses the tokens since the
    state above it, and releases the slots of nodes that only this leaf needs, and the state's memory. Compressing and
    squeezing cost what they cost elsewhere: the state stays. A priority falls when a state is inserted above a leaf's;
    a :class:`NodeHeap` notices that when the leaf comes to its top, so such a leaf may be dropped late.

    Args:
        spans: see :class:`CostAwareRecency`.
        clock: likewise.
        state_slots: token slots that the memory of a node's state would make; None: the node has none.
    """

    def __init__(
        self, spans: Mapping[Node, Span], clock: Callable[[], float], state_slots: Callable[[Node], float | None]
    ) -> None:
        super().__init__(spans, clock)
        self._state_slots = state_slots

    def get_priority(self, node: Node) -> Priority:
        """Priority of dropping a leaf."""
        memory = self._state_slots(node)
        return self.priority(node, 0.0 if memory is None else self._saved_by_state(node, memory))

    def _saved_by_state(self, node: Node, memory: float) -> float:
        """Tokens of prefill that a leaf's state saves, for each slot that goes with it."""
        tokens, slots, is_alone = 0, memory, True
        while True:
            tokens += len(node.key)
            if is_alone:
                slots += self._spans[node].charged_slots if node in self._spans else len(node.key)
            above = node.parent
            if above is None or above.parent is None or self._state_slots(above) is not None:
                return tokens / slots
            is_alone = is_alone and len(above.children) == 1
            node = above


class NodeHeap:
    """Nodes by priority, kept from one eviction to the next: each costs a few steps, however many wait.

    A node that is used stays where it is; its priority is looked up again when it comes to the top.

    Args:
        nodes: in the heap; the set is kept up to date elsewhere.
        priority: of a node; only grows while the node is in the set.
    """

    def __init__(self, nodes: NodeSet, priority: Callable[[Node], Priority]) -> None:
        self._nodes = nodes
        self._priority = priority
        self._heap: list[tuple[Priority, int, Node]] = []

    def top(self) -> tuple[Priority, Node] | None:
        """Priority of the node that goes next, and the node; None if there is none."""
        self._add_new()
        heap, nodes = self._heap, self._nodes
        while heap:
            priority, number, node = heap[0]
            if node not in nodes:
                heapq.heappop(heap)
                continue
            current = self._priority(node)
            if current == priority:
                return priority, node
            heapq.heapreplace(heap, (current, number, node))
        return None

    def pop(self) -> Node | None:
        """Take out the node that goes next; None if there is none."""
        top = self.top()
        if top is None:
            return None
        heapq.heappop(self._heap)
        return top[1]

    def push(self, node: Node) -> None:
        """Put a node in, or back."""
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
