"""Shrinks prefixes when token slots are short, before anything that could be found again is dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_kvevict.compression import CacheObservation, PromptObservation, ReaderObservation
from sgl_kvevict.events.types import Squeezed
from sgl_kvevict.lifecycle.eviction import CostAwareRecency, NodeHeap, Priority
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.pending import Pending
from sgl_kvevict.lifecycle.ranges import Ranges, Verdict
from sgl_kvevict.lifecycle.table import State
from sgl_kvevict.prefix import Segment

ROUND_SHARE = 1 / 64
"""Share of the pool's slots that one round of shrinking releases, so that it serves several requests."""

ANSWERS = 2.5
"""Worth of all answers of a prefix until it is dropped, in prefills of it."""
LOSS_OF_COMPRESSING = ANSWERS * 0.03 / 0.5
"""Loss of compressing a prefix, in tokens of prefill per slot released: 3 % of the answers at 50 % (within the error
of docs/quality.md)."""
LOSS_OF_LIGHT = ANSWERS * 0.03 / 0.3 / 2
"""Loss from the light share to the budget per slot released, relative to the loss of dropping the prefix: another 3 %
from 50 % to 20 %, and dropping it at 50 % costs 2 tokens of prefill a slot."""
LOSS_OF_SQUEEZING = ANSWERS * 0.08 / 0.1 / 5
"""The same from the budget to ``min_budget``: 8 % from 20 % to 10 %, and 5 tokens a slot. Scores of shorter texts lost
7 and 14 % on two seeds; the shipped ones lose 14 and 19 % (docs/quality.md), for which 8 % was not chosen anew."""


@dataclass(frozen=True)
class ShrinkStep:
    """The next step of a prefix that shrinks.

    Attributes:
        loss: per slot released, in tokens of prefill; if ``is_relative``, relative to the loss of dropping the prefix.
        is_below_budget: it is taken only when nothing above the budget is left to shrink.
    """

    loss: float
    is_relative: bool
    is_below_budget: bool


STEPS: Mapping[State, ShrinkStep] = {
    State.FULL: ShrinkStep(LOSS_OF_COMPRESSING, is_relative=False, is_below_budget=False),
    State.LIGHT: ShrinkStep(LOSS_OF_LIGHT, is_relative=True, is_below_budget=False),
    State.COMPRESSED: ShrinkStep(LOSS_OF_SQUEEZING, is_relative=True, is_below_budget=True),
    State.SQUEEZED: ShrinkStep(LOSS_OF_SQUEEZING, is_relative=True, is_below_budget=True),
}


class Pressure(Part):
    """Shrinks uncompressed prefixes if learned scores rank them, and segments above the least share.

    They shrink in steps (``KVEvictConfig.shares``): to the light share by scores at hand, to the budget and to
    ``min_budget`` by the ``order`` stored with the segment.

    Uncompressed prefixes end at nodes, so no two overlap: each *end* stands for the uncompressed tokens from the end
    above it, or from the waterline. They are compressed from the root down.
    """

    def __init__(self, shared: Shared, ranges: Ranges, order: CostAwareRecency, num_slots: int) -> None:
        super().__init__(shared)
        self.order = order
        self._shrinking = self._table.shrinking
        self._ranges = ranges
        self._round = max(int(num_slots * ROUND_SHARE), 1)
        self.clear()

    def clear(self) -> None:
        """Start a new heap: the table was emptied."""
        self._heap = NodeHeap(self._shrinking, self._priority)

    # ---- ends of uncompressed prefixes ------------------------------------------------------------------------

    def prompt_complete(self, path: Sequence[Node], num_tokens: int, prompt: PromptObservation) -> None:
        """Note ends on a path whose first ``num_tokens`` tokens are a prompt."""
        self._note_ends(path, num_tokens - self._config.tail_tokens, prompt, prompt.num_bytes)

    def chunk_complete(self, reader: Reader, path: Sequence[Node]) -> None:
        """Note ends on a path, the first part of a prompt; compress them if ``prefill_budget`` is set.

        The prompt's observation goes on with the rest, and counts towards ``observation_bytes`` once it is complete.
        """
        prompt = self._readers.shrinking_prompt(reader)
        if prompt is None:
            return
        self._note_ends(path, length_of(path), prompt, 0)
        share = self._config.prefill_budget
        if share is not None:
            for node in [node for node in self._spans.uncompressed(path) if node in self._shrinking]:
                self._compress(node, share)

    def _note_ends(self, path: Sequence[Node], end: int, prompt: PromptObservation, num_bytes: int) -> None:
        if not self._compressor.scores_any_range or prompt.has_failed:
            return
        position = start = self._spans.waterline(path)
        for node in self._spans.uncompressed(path):
            position += len(node.key)
            if self._ranges.is_long_enough(min(position, end) - start):
                self._add_end(self._ranges.node_ending_at(path, min(position, end)), prompt, num_bytes)
                start = min(position, end)
            if position >= end:
                return

    def trim_prompts(self) -> None:
        """Drop the oldest kept prompts beyond ``observation_bytes``."""
        prompts = self._table.prompts
        while prompts.num_bytes > self._config.observation_bytes:
            oldest = prompts.oldest()
            assert oldest is not None
            prompts.take(oldest[0])

    def _add_end(self, node: Node, prompt: PromptObservation, num_bytes: int) -> None:
        self._table.let_shrink(node)
        if prompt.num_bytes:
            self._table.prompts.put(node, prompt, num_bytes)
            self.trim_prompts()

    def _discard(self, node: Node) -> None:
        """Make a node no longer an end."""
        self._table.keep_size(node)
        self._table.prompts.take(node)

    # ---- segments that passes read ------------------------------------------------------------------------------

    def unmeasured(self, path: Sequence[Node]) -> list[Segment]:
        """Segments of a path that may shrink further, and whose order passes would improve.

        Only those whose spans all lie on the path: passes do not see entries elsewhere.
        """
        segments = [self._spans[owner].segment for owner in self._spans.owners(path)]
        return [segment for segment in segments if self._is_unmeasured(segment)]

    def passes_over(self, path: Sequence[Node], observation: ReaderObservation) -> None:
        """Shrink segments that passes have measured to the budget, keeping the entries with the most attention."""
        for owner in self._spans.owners(path):
            segment = self._spans[owner].segment
            if segment.order is None or not observation.observes(segment):
                continue
            self._compressor.rank_by_attention(segment)
            slots = self._slots_at(segment, float(self._config.budget))
            if slots == segment.num_slots:
                self._ranges.at_budget(self._spans.last_of(owner))
            elif slots < segment.num_slots:
                self._squeeze_to(owner, slots)

    def _is_unmeasured(self, segment: Segment) -> bool:
        if segment.is_measured or segment.order is None or not self._config.shares:
            return False
        if segment.entry_attention is not None and segment.entry_attention.is_open:
            return False
        return segment.num_slots > self._slots_at(segment, self._config.shares[-1])

    # ---- the reserve ------------------------------------------------------------------------------------------

    def reserve(self) -> int:
        """Token slots that readers hold and that shrinking would release, so that others can have them at any time.

        Prefixes without readers do not count: they can be dropped. Never more than :meth:`relieve` releases.
        """
        if not self._shrinking:
            return 0
        won = 0
        before: dict[Node, list[int]] = {}  # tokens since the end above, by segment, of nodes that are no ends
        for node in self._readers.movable_nodes():
            is_end = node in self._shrinking and node not in self._spans
            segments = [0]
            if node.parent in before and len(node.parent.children) == 1:
                segments = [*before[node.parent], *([0] if self._ranges.begins_segment(node.parent, node) else [])]
            segments[-1] += len(node.key)
            if is_end:
                won += self._reserve_of_end(node, segments)
            elif node in self._shrinking:
                won += self._reserve_of_span(node)
            elif node not in self._spans:
                before[node] = segments
        return won

    def _reserve_of_span(self, owner: Node) -> int:
        segment = self._spans[owner].segment
        if segment.order is None:
            return 0
        return max(segment.num_slots - self._slots_at(segment, self._config.shares[-1]), 0)

    def _reserve_of_end(self, node: Node, segments: Sequence[int]) -> int:
        """Reserve of the last tokens before an end; ``segments``: their number, by the segment that they will be in.

        Nodes above them are left out if others branch off there, whose ranges would have them too; compressed together
        with them they release at least as much.
        """
        if not self._ranges.is_long_enough(sum(segments)):
            return 0
        start, won = length_of(path_to(node)) - sum(segments), 0
        for num_tokens in segments:
            won += num_tokens - self._least_slots(start, num_tokens)
            start += num_tokens
        return won

    def _least_slots(self, start: int, num_tokens: int) -> int:
        """Token slots of a segment of uncompressed tokens from ``start`` on, once it has shrunk as far as it can."""
        config = self._config
        if not config.shares:
            return config.num_slots(num_tokens, start)
        keeps_all = config.slots_at(config.shares[0], num_tokens, start) == num_tokens  # then there is no order
        return num_tokens if keeps_all else config.slots_at(config.shares[-1], num_tokens, start)

    # ---- shrinking --------------------------------------------------------------------------------------------

    def relieve(self, leaf: tuple[Priority, Node] | None, wanted: int = 0) -> int:
        """Take the cheapest steps until ``ROUND_SHARE`` of the pool is released, or none is left.

        Ranges whose entries are being chosen come first: they lose no more than they would two steps later.

        The segment of a prompt longer than the pool releases only the ``wanted`` token slots: it needs the others.

        ``leaf`` would be dropped instead (None: there is no leaf), so steps of higher priority are not taken. But no
        span is dropped, or squeezed below the budget, while something may shrink to the budget.

        Returns:
            Token slots released.
        """
        won = self._ranges.exchange_all()
        rest: list[Node] = []
        while won < self._round and (top := self._heap.top()) is not None:
            (is_below_budget, *rank), node = top
            priority = tuple(rank)
            if leaf is not None and priority > leaf[0] and (is_below_budget or leaf[1] not in self._spans):
                break
            self._heap.pop()
            slots = self._squeeze(node, wanted - won) if node in self._spans else self._compress(node)
            won += slots
            if node in self._shrinking:
                rest.append(node)
            if slots:
                self.order.gave_way(priority)
            if slots or node not in self._shrinking:
                for waiting in rest:  # a node above them was compressed, or is no longer an end
                    self._heap.push(waiting)
                rest.clear()
        for waiting in rest:
            self._heap.push(waiting)
        return won

    def _priority(self, node: Node) -> Priority:
        """Whether a node's next step leads below the budget, then its priority on the scale of dropping a leaf."""
        span = self._spans.at(node)
        can_shrink = span is None or span.segment.order is not None
        step = STEPS[self._table.state(node) if can_shrink else State.SQUEEZED]
        loss = step.loss * self.order.saved(node) if step.is_relative else step.loss
        return step.is_below_budget, *self.order.priority(node, loss)

    def _slots_at(self, segment: Segment, share: float) -> int:
        return self._config.slots_at(share, segment.num_tokens, segment.start)

    def _squeeze(self, owner: Node, wanted: int) -> int:
        """Squeeze a segment to its next share. 0: not now, or never again if the node left ``shrinking``."""
        segment = self._spans[owner].segment
        shares = () if segment.order is None else self._config.shares
        steps = (self._slots_at(segment, share) for share in shares)
        slots = next((slots for slots in steps if slots < segment.num_slots), None)
        if slots is None:
            self._table.keep_size(owner)
            return 0
        if segment.is_joined:
            slots = max(slots, segment.num_slots - max(wanted, self._round))
        return self._squeeze_to(owner, slots)

    def _squeeze_to(self, owner: Node, slots: int) -> int:
        """Squeeze a segment; 0: a reader is not movable. One whose prompt goes on is not complete at the budget."""
        readers = self._readers.movable(owner)
        if readers is None:
            return 0
        freed = self._table.squeeze(owner, slots)
        self._tree.charge(owner, -freed.numel())
        self._tree.free(freed)
        segment = self._spans[owner].segment
        self._table.listener.tell(Squeezed(owner.id, segment.num_slots, freed.numel()))
        is_at_budget = slots == self._slots_at(segment, float(self._config.budget))
        if is_at_budget and not any(map(self._readers.shrinking_prompt, readers)):
            self._ranges.at_budget(self._spans.last_of(owner))
        return freed.numel()

    def _compress(self, node: Node, share: float | None = None) -> int:
        """Compress the range that ends at a node (``share`` None: to the first of ``shares``).

        0: not now, or never again if the node is no longer an end.
        """
        path = path_to(node)
        if any(above in self._shrinking and above not in self._spans for above in path[:-1]):
            return 0
        end = length_of(path)
        if not self._ranges.is_long_enough(end - self._spans.waterline(path)):
            self._discard(node)
            return 0
        if share is None and self._config.shares:
            share = self._config.shares[0]
        observation = self._table.prompts.get(node) or CacheObservation()
        done = self._ranges.compress_now(path, Pending(end, observation, share))
        if done.verdict is Verdict.FAILED and done.num_slots == 0:
            self._discard(node)  # admission must not count on it
        elif any(map(self._readers.shrinking_prompt, self._readers.movable(node) or ())):
            self._ranges.join(path)
        return done.num_slots
