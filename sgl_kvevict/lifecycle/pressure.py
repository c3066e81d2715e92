"""What happens when token slots are short: prefixes shrink before anything that could be found again is dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from sgl_kvevict.compression import CacheObservation, Compressor, PromptObservation, ReaderObservation
from sgl_kvevict.lifecycle.eviction import CostAwareRecency, NodeHeap, NodeSet, Priority
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, length_of, path_to
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.readers import LiveReaders
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.prefix import Segment

ROUND_SHARE = 1 / 64
"""Share of the pool's slots that are won at once when prefixes shrink, so that several requests live on one round."""

ANSWERS = 2.5
"""What all answers of a prefix until it would be dropped are worth, in prefills of it."""
LOSS_OF_COMPRESSING = ANSWERS * 0.03 / 0.5
"""What compressing an uncompressed prefix loses per slot won, in tokens of prefill: 3 % of the answers at 50 % (what
docs/quality.md measures of that is within its error)."""
LOSS_OF_LIGHT = ANSWERS * 0.03 / 0.3 / 2
"""What going from the light share to the budget loses per slot won, in parts of what dropping the prefix loses: another
3 % from 50 % to 20 %, and dropping it at 50 % costs 2 tokens of prefill a slot."""
LOSS_OF_SQUEEZING = ANSWERS * 0.08 / 0.1 / 5
"""The same for going from the budget to the least budget: 8 % from 20 % to 10 % (what scores of shorter
texts lost: 7 and 14 % on two seeds; the shipped ones lose 14 and 19 %, docs/quality.md, and this was not chosen anew),
and 5 tokens of prefill a slot."""


class Pressure:
    """Prefixes that can shrink: uncompressed ones that can be scored at any time, and spans above the least share.

    They shrink in steps (``KVEvictConfig.shares``): to the light share by scores that are at hand, to the budget and to
    the least budget by what was stored of these scores, or of those of passes.

    Uncompressed ones end at nodes, so that no two of them overlap: each *end* stands for the uncompressed tokens from
    the end above it, or the waterline. They are compressed from the root down.

    Args:
        tree: whose nodes.
        spans: what the nodes hold.
        ranges: compresses.
        readers: who follows when what is read shrinks.
        compressor: its configuration says how far.
        order: what gives way first.
        num_slots: of the pool.

    Attributes:
        listener: told of what was squeezed.
        order: see above.
        num_bytes: memory of what prompts left behind for ranges that may be compressed.
        is_being_read: whether a node belongs to a prefix between two of its passes.
    """

    def __init__(
        self,
        tree: TreePort,
        spans: SpanTable,
        ranges: Ranges,
        readers: LiveReaders,
        compressor: Compressor,
        order: CostAwareRecency,
        num_slots: int,
    ) -> None:
        self.listener = CacheListener()
        self.order = order
        self._tree = tree
        self._spans = spans
        self._ranges = ranges
        self._readers = readers
        self._compressor = compressor
        self._config = compressor.config
        self._round = max(int(num_slots * ROUND_SHARE), 1)
        self.is_being_read: Callable[[Node], bool] = lambda node: False
        self.clear()

    def clear(self) -> None:
        """The tree was flushed."""
        self._nodes = NodeSet()
        self._heap = NodeHeap(self._nodes, self._priority)
        self._prompts: OrderedDict[Node, PromptObservation] = OrderedDict()
        self.num_bytes = 0

    # ---- what can shrink --------------------------------------------------------------------------------------

    def prompt_complete(self, path: Sequence[Node], num_tokens: int, prompt: PromptObservation) -> None:
        """The first ``num_tokens`` of a path are a prompt: note where its uncompressed tokens may be compressed."""
        if not (self._compressor.has_learned or prompt.has_echo):
            return
        end = num_tokens - self._config.tail_tokens
        position = start = self._spans.waterline(path)
        for node in [node for node in path if node not in self._spans]:
            position += len(node.key)
            if min(position, end) - start >= self._config.min_prefix_tokens:
                if self._saw(prompt, start):
                    self._add_end(self._ranges.node_ending_at(path, min(position, end)), prompt)
                    start = min(position, end)
                elif node in self._nodes:
                    start = position
            if position >= end:
                return

    def _saw(self, prompt: PromptObservation, start: int) -> bool:
        """Whether what a prompt left behind scores the tokens from a position on: echo needs their own queries."""
        return self._compressor.has_learned or prompt.first_query - start < self._config.min_prefix_tokens

    def _can_score(self, node: Node) -> bool:
        """Whether the uncompressed range that ends at a node can be scored now.

        While scores are learned, what passes are reading stays as it is: only from uncompressed ranges is learned.
        """
        if self._compressor.has_learned:
            return True
        prompt = self._prompts.get(node)
        return prompt is not None and prompt.has_echo and not self.is_being_read(node)

    def installed(self, nodes: Sequence[Node]) -> None:
        """Consecutive nodes hold a new segment; the first one, which owns it, may be squeezed later."""
        for node in nodes:
            self.discard(node)
        if len(self._config.shares) > 1:
            self._nodes.add(nodes[0])

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut: both halves of an uncompressed one are ends, the upper half of a compressed one owns it."""
        if lower not in self._nodes:
            return
        self._nodes.add(upper)
        if lower in self._spans:
            self._nodes.discard(lower)
        elif lower in self._prompts:
            self._keep_prompt(upper, self._prompts[lower])

    def unread(self, path: Sequence[Node]) -> list[Segment]:
        """Segments of a path that readers would order better, and that may shrink yet.

        Only those that lie on the path as a whole: others have entries that its readers do not see.
        """
        segments = [self._spans[owner].segment for owner in self._spans.owners(path)]
        return [segment for segment in segments if self._is_unread(segment)]

    def _is_unread(self, segment: Segment) -> bool:
        if segment.is_measured or segment.worth is None or not self._config.shares:
            return False
        if segment.entry_attention is not None and segment.entry_attention.is_open:
            return False
        return segment.num_slots > self._slots_at(segment, self._config.shares[-1])

    def was_read(self, path: Sequence[Node], observation: ReaderObservation) -> None:
        """Passes are over: segments of a path that they read shrink to the budget, to what the passes would keep."""
        for owner in self._spans.owners(path):
            segment = self._spans[owner].segment
            if not observation.observes(segment):
                continue
            self._compressor.rank_by_attention(segment)
            slots = self._slots_at(segment, float(self._config.budget))
            if slots == segment.num_slots:
                self._ranges.on_budget(self._spans.last_of(owner))
            elif slots < segment.num_slots and self._readers.movable(owner) is not None:
                self._squeeze_to(owner, slots)

    def discard(self, node: Node) -> None:
        """A node was dropped, or is no end any more."""
        self._nodes.discard(node)
        self._forget_prompt(node)

    def reserve(self) -> int:
        """Token slots that readers hold and that shrinking would win: they can be had for other requests at any time.

        What nobody reads is not counted: it can be dropped. Never more than :meth:`relieve` gives.
        """
        if not self._nodes:
            return 0
        won = 0
        waits: set[Node] = set()  # ends that do not shrink now, and what is below them
        for node in self._readers.movable_nodes():
            if node.parent in waits or (node in self._nodes and node not in self._spans and not self._can_score(node)):
                waits.add(node)
            elif node in self._nodes:
                won += self._reserve_of_span(node) if node in self._spans else self._reserve_of_end(node)
        return won

    def _reserve_of_span(self, owner: Node) -> int:
        segment = self._spans[owner].segment
        if segment.worth is None:
            return 0
        return max(segment.num_slots - self._slots_at(segment, self._config.shares[-1]), 0)

    def _reserve_of_end(self, node: Node) -> int:
        """Of the node alone; compressed together with short nodes above it, it wins as much at least."""
        config, num_tokens = self._config, len(node.key)
        if num_tokens < config.min_prefix_tokens:
            return 0
        if not config.shares:
            return num_tokens - config.num_slots(num_tokens, length_of(path_to(node)) - num_tokens)
        keeps_all = config.slots_at(config.shares[0], num_tokens) == num_tokens  # then nothing says what is worth least
        return 0 if keeps_all else num_tokens - config.slots_at(config.shares[-1], num_tokens)

    # ---- shrinking --------------------------------------------------------------------------------------------

    def relieve(self, leaf: tuple[Priority, Node] | None) -> int:
        """Shrink what costs least, until ``ROUND_SHARE`` of the pool was won, or nothing is left.

        Args:
            leaf: what would be dropped instead, and its priority; what costs more does not shrink. But no span is
                dropped, or squeezed below the budget, while something may shrink to the budget. None: there is no leaf.

        Returns:
            Token slots that came back.
        """
        self._compressor.is_short = True
        won = 0
        rest: list[Node] = []
        while won < self._round and (top := self._heap.top()) is not None:
            (is_last, *rank), node = top
            priority = tuple(rank)
            if leaf is not None and priority > leaf[0] and (is_last or leaf[1] not in self._spans):
                break
            self._heap.pop()
            slots = self._shrink(node)
            won += slots
            if node in self._nodes:
                rest.append(node)
            if slots:
                self.order.gave_way(priority)
            if slots or node not in self._nodes:
                for waiting in rest:  # what is above them was compressed, or is no end any more
                    self._heap.push(waiting)
                rest.clear()
        for waiting in rest:
            self._heap.push(waiting)
        return won

    def _shrink(self, node: Node) -> int:
        """Take a node's next step; 0: not now, or (then it is no longer there) never again."""
        return self._squeeze(node) if node in self._spans else self._compress(node)

    def _priority(self, node: Node) -> Priority:
        """Whether a node's next step leads below the budget, then the step's priority beside dropping a leaf."""
        if node not in self._spans:
            return False, *self.order.priority(node, LOSS_OF_COMPRESSING)
        is_last = self._is_last(node)
        loss = LOSS_OF_SQUEEZING if is_last else LOSS_OF_LIGHT
        return is_last, *self.order.priority(node, loss * self.order.saved(node))

    def _is_last(self, node: Node) -> bool:
        """Whether the next step of a node with a span leads below the budget, or there is none."""
        slots = self._next_slots(node)
        return slots is None or slots < self._slots_at(self._spans[node].segment, float(self._config.budget))

    def _slots_at(self, segment: Segment, share: float) -> int:
        return self._config.slots_at(share, segment.end - segment.start)

    def _next_slots(self, owner: Node) -> int | None:
        """Token slots that the segment of a node shrinks to next; None: it does not shrink any more."""
        segment = self._spans[owner].segment
        if segment.worth is None:
            return None
        steps = (self._slots_at(segment, share) for share in self._config.shares)
        return next((slots for slots in steps if slots < segment.num_slots), None)

    def _squeeze(self, owner: Node) -> int:
        slots = self._next_slots(owner)
        if slots is None:
            self._nodes.discard(owner)
            return 0
        if self._readers.movable(owner) is None:
            return 0
        return self._squeeze_to(owner, slots)

    def _squeeze_to(self, owner: Node, slots: int) -> int:
        freed = self._spans.squeeze(owner, slots)
        self._tree.charge(owner, -freed.numel())
        self._tree.free(freed)
        segment = self._spans[owner].segment
        self.listener.squeezed(owner, segment, freed.numel())
        if slots == self._slots_at(segment, float(self._config.budget)):
            self._ranges.on_budget(self._spans.last_of(owner))
        return freed.numel()

    def _compress(self, node: Node) -> int:
        path = path_to(node)
        if any(above in self._nodes and above not in self._spans for above in path[:-1]):
            return 0
        end = length_of(path)
        if end - self._spans.waterline(path) < self._config.min_prefix_tokens:
            self.discard(node)
            return 0
        if not self._can_score(node):
            return 0
        share = self._config.shares[0] if self._config.shares else None
        won = self._ranges.compress_now(node, end, self._prompts.get(node) or CacheObservation(), share)
        if won == 0 and node not in self._spans:  # it failed: nobody may count on it any more
            self.discard(node)
        return won or 0

    def _add_end(self, node: Node, prompt: PromptObservation) -> None:
        self._nodes.add(node)
        if prompt.num_bytes:
            self._keep_prompt(node, prompt)

    def _keep_prompt(self, node: Node, prompt: PromptObservation) -> None:
        """What a prompt left behind is kept for a range; the oldest make room."""
        self._forget_prompt(node)
        self._prompts[node] = prompt
        self.num_bytes += prompt.num_bytes
        while self.num_bytes > self._config.observation_bytes:
            oldest = next(iter(self._prompts))
            self._forget_prompt(oldest)
            if not self._compressor.has_learned:
                self._nodes.discard(oldest)

    def _forget_prompt(self, node: Node) -> None:
        prompt = self._prompts.pop(node, None)
        self.num_bytes -= 0 if prompt is None else prompt.num_bytes
