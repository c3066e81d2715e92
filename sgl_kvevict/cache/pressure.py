"""Shrinks prefixes when token slots are short, as long as that loses less than dropping a leaf of the tree."""

from __future__ import annotations

from typing import NamedTuple

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.cache.recency import CostAwareRecency, NodeHeap, Priority
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.segments.segment import Segment

ROUND_SHARE = 1 / 64
"""Share of the pool's slots that one round of shrinking releases, so that it serves several requests."""

ANSWERS = 2.5
"""What all answers of a prefix until it is dropped are worth, in prefills of the prefix."""


class Losses(NamedTuple):
    """Losses per slot released of the steps in which a prefix shrinks, relative to dropping it before the step."""

    budget: float
    between: float  # from the budget half-way to the least share
    least: float


WITH_16_BITS = Losses(budget=ANSWERS * 0.06 / 0.8, between=ANSWERS * 0.08 / 0.1 / 5, least=ANSWERS * 0.08 / 0.1 / 5)
"""6 % of the answers are lost at 20 %, where dropping it costs 5 tokens of prefill a slot, and another 8 % at 10 %.
Scores of shorter texts lost 7 and 14 % by the last step on two seeds; the shipped ones lose 14 and 19 %, for which 8 %
was not chosen anew."""
LOST_PER_NAT = 1.4
"""Part of the answers that is lost where the next tokens diverge by a nat: the 6 % at 20 % and 14 % at 10 % above, with
rows of 16 bits, over the 0.0370 and 0.1158 nats that were measured there (docs/results/quality/bits.md)."""
DIVERGENCE = {0.2: 0.0032, 0.125: 0.0072, 0.05: 0.0423}
"""Nats a token by which they diverge with rows of 4 bits, by share of the bytes (``benchmarks/quality/bits.py``,
format "auto", SmolLM2, mean of three texts)."""


def _loss(before: float, after: float) -> float:
    """Loss of a step between two shares, relative to the loss of dropping the prefix before it.

    A slot then saves ``1 / before`` tokens of prefill.
    """
    lost = LOST_PER_NAT * (DIVERGENCE[after] - DIVERGENCE.get(before, 0.0))
    return round(ANSWERS * lost / (before - after) * before, 3)


WITH_FEW_BITS = Losses(budget=_loss(1.0, 0.2), between=_loss(0.2, 0.125), least=_loss(0.125, 0.05))
"""Of the default's shares; others, if configured, count the same."""


class Pressure:
    """Shrinks what may shrink when slots are short, in steps (``KVEvictConfig.shares``).

    An open range that waits for this goes to the budget. A segment gives up bits and entries by the order that it has,
    down to ``min_budget``.
    """

    def __init__(self, core: Core, resizer: Resizer, recency: CostAwareRecency) -> None:
        self._table, self._spans, self._shrinking = core.table, core.table.spans, core.table.shrinking
        self._readers, self._config = core.readers, core.compressor.config
        self._resizer, self._recency = resizer, recency
        self._losses = WITH_16_BITS if self._config.bits == 16 else WITH_FEW_BITS
        self._round = max(int(core.compressor.packer.geometry.num_token_slots * ROUND_SHARE), 1)
        self.clear()

    def clear(self) -> None:
        """Start a new heap: the table was emptied."""
        self._heap = NodeHeap(self._shrinking, self._priority)

    # ---- reclaimable slots ------------------------------------------------------------------------------------

    def reclaimable(self) -> int:
        """Token slots of nodes with readers that shrinking would release, so that others can have them at any time.

        Nodes without readers do not count: they can be dropped. :meth:`reclaim` releases at least as many.
        """
        # SGLang asks several times for each request, mostly when there is nothing to count.
        if not (self._shrinking or self._table.open):
            return 0
        nodes = self._readers.movable_nodes()
        num_reclaimable = self._resizer.reclaimable(nodes)
        for node in nodes:
            if node not in self._shrinking or node in self._table.growing:
                continue
            if (span := self._spans.get(node)) is not None and span.segment.keys is not None:
                segment = span.segment
                least = self._resizer.slots_at(segment, self._config.shares[-1])
                num_reclaimable += max(segment.num_slots - least, 0)
        return num_reclaimable

    # ---- shrinking --------------------------------------------------------------------------------------------

    def reclaim(self, leaf: Priority | None) -> int:
        """Take the cheapest steps until ``ROUND_SHARE`` of the pool is released, or none is left.

        Open ranges that need not wait come first: they lose no more than they would two turns later. ``leaf``: priority
        of the leaf that would be dropped next; steps of higher priority are not taken. None: there is none. Returns the
        token slots released.
        """
        # Once: no reader comes or goes before this returns.
        movable = set(self._readers.movable_nodes()) if self._table.open else set()
        num_released = self._resizer.try_open(movable)
        rest: list[Node] = []
        # More than was asked for: each round walks readers and paths, and the next request needs room, too.
        while num_released < self._round and (top := self._heap.top()) is not None:
            priority, node = top
            if leaf is not None and priority > leaf:
                break
            self._heap.pop()
            slots = self._shrink(node, movable)
            num_released += slots
            if node in self._shrinking:
                rest.append(node)
            if slots:
                # As for a dropped leaf: what is used from now on is worth more than what was not.
                self._recency.raise_level(priority)
            if slots or node not in self._shrinking:
                for waiting in rest:  # another range with the same beginning was compressed, or shrinks no more
                    self._heap.push(waiting)
                rest.clear()
        # Back into the heap: the next round may find their readers gone.
        for waiting in rest:
            self._heap.push(waiting)
        return num_released

    def _priority(self, node: Node) -> Priority:
        """Priority of a node's next step, on the scale of dropping a leaf."""
        span, share = self._spans.get(node), self._config.budget
        if span is not None:
            share = self._next_share(span.segment) or self._config.shares[-1]
        by_share = {self._config.shares[-1]: self._losses.least, self._config.budget: self._losses.budget}
        loss = by_share.get(share, self._losses.between) * self._recency.saved(node)
        if span is not None and share < self._config.budget:
            loss = self._recency.loss_below_budget(span.segment, loss)
        return self._recency.priority(node, loss)

    def _next_share(self, segment: Segment) -> float | None:
        """The share to which a segment shrinks next; None: it does not shrink any more."""
        shares = () if segment.keys is None else self._config.shares
        return next((share for share in shares if self._resizer.slots_at(segment, share) < segment.num_slots), None)

    def _shrink(self, node: Node, movable: set[Node]) -> int:
        """Take the next step of a segment, or of a range that waits; return the token slots released.

        ``movable`` as in :meth:`Resizer.try_waiting`. 0: it cannot shrink now; if the node has left ``shrinking``, it
        never can.
        """
        span = self._spans.get(node)
        if span is None:
            return self._resizer.try_waiting(node, movable)
        if node in self._table.growing:
            return 0
        segment = span.segment
        share = self._next_share(segment)
        if share is None:
            self._shrinking.discard(node)
            return 0
        return self._resizer.resize(segment, self._resizer.slots_at(segment, share))
