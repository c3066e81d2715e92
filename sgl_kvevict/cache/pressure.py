"""Shrinks prefixes when token slots are short, as long as that loses less than dropping a leaf of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.recency import CostAwareRecency, NodeHeap, Priority
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Occasion, Resizer
from sgl_kvevict.segments import Compressor, PromptObservation, Segment

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
    """Shrinks segments whose entries are ordered, or can be, above the least share.

    They shrink in steps (``KVEvictConfig.shares``). A segment in place is ranked, and packed at the first share. A
    packed one gives up bits and entries by the order that it has, down to the budget and to ``min_budget``. Segments in
    place of one path shrink from the root down.
    """

    def __init__(
        self,
        table: PrefixTable,
        readers: ReaderTable,
        compressor: Compressor,
        resizer: Resizer,
        recency: CostAwareRecency,
    ) -> None:
        self._table = table
        self._spans = table.spans
        self._shrinking = table.shrinking
        self._readers = readers
        self._compressor = compressor
        self._config = compressor.config
        self._resizer = resizer
        self._recency = recency
        self._losses = WITH_16_BITS if self._config.bits == 16 else WITH_FEW_BITS
        self._round = max(int(compressor.packer.geometry.num_token_slots * ROUND_SHARE), 1)
        self.clear()

    def clear(self) -> None:
        """Start a new heap: the table was emptied."""
        self._heap = NodeHeap(self._shrinking, self._priority)

    def prompt_complete(self, path: Sequence[Node], num_tokens: int, prompt: PromptObservation) -> None:
        """Let the first ``num_tokens`` tokens of a path, a prompt, shrink when slots are short; its tail does not."""
        if self._compressor.scores_any_range and not prompt.has_failed:
            self._resizer.cover(path, num_tokens - self._config.tail_tokens, prompt, prompt.num_bytes)

    def chunk_complete(self, reader: Reader, path: Sequence[Node]) -> None:
        """Let the first chunks of a prompt shrink; they do so at once if ``prefill_budget`` is set.

        The prompt's observation continues with the other chunks. It counts towards ``observation_bytes`` once it is
        complete.
        """
        prompt = self._readers.shrinking_prompt(reader)
        if prompt is None or not self._compressor.scores_any_range or prompt.has_failed:
            return
        self._resizer.cover(path, length_of(path), prompt, 0)
        share = self._config.prefill_budget
        if share is not None:
            for segment in self._table.chain(path):
                if segment in self._table.in_place and self._table.in_place[segment] in self._shrinking:
                    self._compress(segment, share)

    def compressed_tokens(self, reader: Reader, path: Sequence[Node]) -> int:
        """Tokens of a prompt that were computed, and compressed before its last chunk was computed."""
        prompt = self._readers.shrinking_prompt(reader)
        return 0 if prompt is None else max(self._spans.compressed_len(path) - prompt.first_query, 0)

    # ---- reclaimable slots ------------------------------------------------------------------------------------

    def reclaimable(self) -> int:
        """Token slots of nodes with readers that shrinking would release, so that others can have them at any time.

        Nodes without readers do not count: they can be dropped. :meth:`reclaim` releases at least as many.
        """
        if not self._shrinking:
            return 0
        num_reclaimable = 0
        for node in self._readers.movable_nodes():
            if node in self._shrinking:
                span = self._spans.of(node)
                assert span is not None
                num_reclaimable += self._reclaimable_of(span.segment)
        return num_reclaimable

    def _reclaimable_of(self, segment: Segment) -> int:
        """Token slots that a segment which may shrink would release."""
        if segment.packed is not None:
            least = self._least_slots(segment.start, segment.num_tokens)
            return 0 if segment.order is None else max(segment.num_slots - least, 0)
        if not self._resizer.is_long_enough(segment.num_tokens):
            return 0  # it shrinks only together with the segment below it
        start, num_reclaimable = segment.start, 0
        parts: list[list[Node]] = []
        for node in self._table.nodes_of(segment):
            if not parts or self._resizer.begins_segment(parts[-1][-1], node):
                parts.append([])
            parts[-1].append(node)
        for part in parts:
            num_tokens = length_of(part)
            num_reclaimable += num_tokens - self._least_slots(start, num_tokens)
            start += num_tokens
        return num_reclaimable

    def _least_slots(self, start: int, num_tokens: int) -> int:
        """Token slots of a segment that begins at ``start``, once it has shrunk as far as it may."""
        return self._config.num_slots(num_tokens, start, self._config.shares[-1])

    # ---- shrinking --------------------------------------------------------------------------------------------

    def reclaim(self, leaf: tuple[Priority, Node] | None, wanted: int = 0) -> int:
        """Take the cheapest steps until ``ROUND_SHARE`` of the pool is released, or none is left.

        Ranges whose entries are being ranked come first: they lose no more than they would two turns later.

        Args:
            leaf: the priority of the leaf that would be dropped next, and this leaf; None: there is none. Steps of
                higher priority are not taken. But while a segment may shrink to the budget, no span is dropped, and
                nothing shrinks below the budget.
            wanted: token slots that are needed. The segment of a prompt longer than the pool releases no more than
                these, or one round: it needs the others.

        Returns:
            Token slots released.
        """
        num_released = self._resizer.try_wanted(Occasion.SHORT)
        rest: list[Node] = []
        while num_released < self._round and (top := self._heap.top()) is not None:
            (is_below_budget, *rank), node = top
            priority = tuple(rank)
            if leaf is not None and priority > leaf[0] and (is_below_budget or leaf[1] not in self._spans):
                break
            self._heap.pop()
            slots = self._shrink(node, wanted - num_released)
            num_released += slots
            if node in self._shrinking:
                rest.append(node)
            if slots:
                self._recency.raise_level(priority)
            if slots or node not in self._shrinking:
                for waiting in rest:  # a segment above them was packed, or shrinks no more
                    self._heap.push(waiting)
                rest.clear()
        for waiting in rest:
            self._heap.push(waiting)
        return num_released

    def _priority(self, node: Node) -> Priority:
        """Whether a segment's next step leads below the budget, then its priority on the scale of dropping a leaf."""
        span = self._spans.of(node)
        assert span is not None
        segment = span.segment
        if segment.packed is None:
            return False, *self._recency.priority(node, self._losses.packing)
        is_above_budget = segment.order is not None and segment.num_slots > self._resizer.slots_at(segment)
        loss = self._loss_of_step(segment) * self._recency.saved(node)
        if not is_above_budget:
            loss = self._recency.loss_below_budget(segment, loss)
        return not is_above_budget, *self._recency.priority(node, loss)

    def _next_share(self, segment: Segment) -> float | None:
        """The share to which a packed segment shrinks next; None: it does not shrink any more."""
        shares = () if segment.order is None else self._config.shares
        return next((share for share in shares if self._resizer.slots_at(segment, share) < segment.num_slots), None)

    def _loss_of_step(self, segment: Segment) -> float:
        """Loss of a packed segment's next step, relative to the loss of dropping it there."""
        share, budget = self._next_share(segment), self._config.budget
        if share is None or share < budget:
            is_between = share is not None and share > self._config.shares[-1]
            return self._losses.between if is_between else self._losses.least
        return self._losses.budget if share == budget else self._losses.whole

    def _shrink(self, node: Node, wanted: int) -> int:
        """Let a segment take its next step; return the token slots released.

        0: it cannot shrink now; if the node has left ``shrinking``, it never can.
        """
        span = self._spans.of(node)
        assert span is not None
        segment = span.segment
        if segment.packed is None:
            return self._compress(segment, self._config.shares[0])
        share = self._next_share(segment)
        if share is None:
            self._shrinking.discard(node)
            return 0
        slots = self._resizer.slots_at(segment, share)
        if segment.is_joined:
            slots = max(slots, segment.num_slots - max(wanted, self._round))
        return self._resizer.resize([segment], slots)

    def _compress(self, segment: Segment, share: float) -> int:
        """Pack a segment in place, with those above it that are too short alone; return as :meth:`_shrink`."""
        path = path_to(self._table.in_place[segment])
        chain = self._table.chain(path)
        if any(self._table.in_place[above] in self._shrinking for above in chain[:-1]):
            return 0
        if not self._resizer.is_long_enough(segment.end - chain[0].start):
            self._shrinking.discard(path[-1])
            return 0
        readers = self._readers.movable(self._table.nodes_of(chain[0])[0])
        if readers is None:
            return 0
        num_released = self._resizer.shrink_now(chain, share)
        if any(map(self._readers.shrinking_prompt, readers)):
            self._resizer.join(path)
        return num_released
