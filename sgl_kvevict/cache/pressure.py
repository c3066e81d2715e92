"""Shrinks prefixes when token slots are short, as long as that loses less than dropping a leaf of the tree."""

from __future__ import annotations

from typing import NamedTuple

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.cache.recency import CostAwareRecency, NodeHeap, Priority
from sgl_kvevict.cache.resize import Occasion, Resizer
from sgl_kvevict.segments import Segment

ROUND_SHARE = 1 / 64
"""Share of the pool's slots that one round of shrinking releases, so that it serves several requests."""

ANSWERS = 2.5
"""What all answers of a prefix until it is dropped are worth, in prefills of the prefix."""


class Losses(NamedTuple):
    """Losses of the steps in which a prefix shrinks, per slot released.

    ``packing`` is in tokens of prefill; the others are relative to the loss of dropping the prefix before the step.
    """

    packing: float  # to the first share above the budget
    whole: float  # to another one above the budget: no entry is evicted, or few
    budget: float
    between: float  # from the budget half-way to the least share
    least: float


WITH_16_BITS = Losses(
    packing=ANSWERS * 0.03 / 0.5,
    whole=ANSWERS * 0.03 / 0.3 / 2,
    budget=ANSWERS * 0.03 / 0.3 / 2,
    between=ANSWERS * 0.08 / 0.1 / 5,
    least=ANSWERS * 0.08 / 0.1 / 5,
)
"""3 % of the answers are lost at 50 % (within the error of docs/quality.md), another 3 % from there to 20 %, where
dropping it costs 2 tokens of prefill a slot, and 8 % from 20 % to 10 %, where that is 5. Scores of shorter texts lost 7
and 14 % by the last step on two seeds; the shipped ones lose 14 and 19 %, for which 8 % was not chosen anew."""
LOST_PER_NAT = 1.8
"""Part of the answers that is lost where the next tokens diverge by a nat: the 6 % at 20 % and 14 % at 10 % above, with
rows of 16 bits, over the 0.0320 and 0.0803 nats that were measured there (docs/results/quality/bits.md)."""
DIVERGENCE = {0.5: 0.0008, 0.375: 0.0009, 0.2: 0.0036, 0.125: 0.0162, 0.05: 0.0597}
"""Nats a token by which they diverge with rows of 8 and 4 bits, by share of the bytes (``benchmarks/quality/bits.py``,
format "auto", SmolLM2, mean of three texts)."""


def _loss(before: float, after: float) -> float:
    """Loss of a step between two shares, relative to the loss of dropping the prefix before it.

    A slot then saves ``1 / before`` tokens of prefill.
    """
    lost = LOST_PER_NAT * (DIVERGENCE[after] - DIVERGENCE.get(before, 0.0))
    return round(ANSWERS * lost / (before - after) * before, 3)


_WHILE_WHOLE = ANSWERS * LOST_PER_NAT * DIVERGENCE[0.375] / (1 - 0.375)
"""Tokens of prefill a slot for both steps that keep every entry: by itself the second one, to 0.375, loses so little
that each prefix would be written twice in a row."""
WITH_FEW_BITS = Losses(
    packing=_WHILE_WHOLE,
    whole=_WHILE_WHOLE / 2,
    budget=_loss(0.375, 0.2),
    between=_loss(0.2, 0.125),
    least=_loss(0.125, 0.05),
)
"""Of the default's shares; others, if configured, count the same."""


class Pressure:
    """Shrinks what may shrink when slots are short, in steps (``KVEvictConfig.shares``).

    An open range that waits for this is compressed. A segment gives up bits and entries by the order that it has, down
    to the budget and to ``min_budget``.
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
        if not (self._shrinking or self._table.open):
            return 0
        nodes = self._readers.movable_nodes()
        num_reclaimable = self._resizer.reclaimable(nodes)
        for node in nodes:
            if node in self._shrinking and (span := self._spans.at(node)) is not None and span.segment.keys is not None:
                segment = span.segment
                least = self._resizer.least_slots(segment.num_tokens, segment.start)
                num_reclaimable += max(segment.num_slots - least, 0)
        return num_reclaimable

    # ---- shrinking --------------------------------------------------------------------------------------------

    def reclaim(self, leaf: tuple[Priority, Node] | None) -> int:
        """Take the cheapest steps until ``ROUND_SHARE`` of the pool is released, or none is left.

        Open ranges that need not wait come first: they lose no more than they would two turns later.

        Args:
            leaf: the priority of the leaf that would be dropped next, and this leaf; None: there is none. Steps of
                higher priority are not taken. But while a segment may shrink to the budget, no span is dropped, and
                nothing shrinks below the budget.

        Returns:
            Token slots released.
        """
        num_released = self._resizer.try_open(Occasion.SHORT)
        rest: list[Node] = []
        while num_released < self._round and (top := self._heap.top()) is not None:
            (is_below_budget, *rank), node = top
            priority = tuple(rank)
            if leaf is not None and priority > leaf[0] and (is_below_budget or leaf[1] not in self._spans):
                break
            self._heap.pop()
            slots = self._shrink(node)
            num_released += slots
            if node in self._shrinking:
                rest.append(node)
            if slots:
                self._recency.raise_level(priority)
            if slots or node not in self._shrinking:
                for waiting in rest:  # an older range with the same beginning was compressed, or shrinks no more
                    self._heap.push(waiting)
                rest.clear()
        for waiting in rest:
            self._heap.push(waiting)
        return num_released

    def _priority(self, node: Node) -> Priority:
        """Whether the next step leads below the budget, then its priority on the scale of dropping a leaf."""
        span = self._spans.at(node)
        if span is None:
            return False, *self._recency.priority(node, self._losses.packing)
        segment = span.segment
        is_above_budget = segment.keys is not None and segment.num_slots > self._resizer.slots_at(segment)
        loss = self._loss_of_step(segment) * self._recency.saved(node)
        if not is_above_budget:
            loss = self._recency.loss_below_budget(segment, loss)
        return not is_above_budget, *self._recency.priority(node, loss)

    def _next_share(self, segment: Segment) -> float | None:
        """The share to which a segment shrinks next; None: it does not shrink any more."""
        shares = () if segment.keys is None else self._config.shares
        return next((share for share in shares if self._resizer.slots_at(segment, share) < segment.num_slots), None)

    def _loss_of_step(self, segment: Segment) -> float:
        """Loss of a segment's next step, relative to the loss of dropping it there."""
        share, budget = self._next_share(segment), self._config.budget
        if share is None or share < budget:
            is_between = share is not None and share > self._config.shares[-1]
            return self._losses.between if is_between else self._losses.least
        return self._losses.budget if share == budget else self._losses.whole

    def _shrink(self, node: Node) -> int:
        """Take the next step of a segment, or of a range that waits; return the token slots released.

        0: it cannot shrink now; if the node has left ``shrinking``, it never can.
        """
        span = self._spans.at(node)
        if span is None:
            return self._resizer.try_waiting(node)
        segment = span.segment
        share = self._next_share(segment)
        if share is None:
            self._shrinking.discard(node)
            return 0
        return self._resizer.resize(segment, self._resizer.slots_at(segment, share))
