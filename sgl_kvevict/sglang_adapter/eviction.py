"""Which leaf goes first when token slots are short."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from sgl_kvevict.prefix import Span

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode as TreeNode

MAX_LEVELS = 1024
"""Levels that are remembered; nodes that were used before the first of them count as used then."""

Priority = tuple[float, float]
"""(credit, time of the last access); the smallest goes first."""


class CostAwareRecency(EvictionStrategy):
    """Recency, weighed by what a token slot saves: the tokens of prefill that dropping it would cost.

    A compressed prefix of 1,000 tokens in 200 slots saves five tokens a slot, the last question below it one. Plain
    recency drops the prefix to keep questions that nobody asks again. Here a leaf's credit is the level at its last
    access plus the tokens per slot that it saves, and the level rises to the credit of what was dropped last: what
    saves little goes first, and what saves much goes too once it was left alone for long enough. Where all leaves save
    the same (a budget of 1.0) this is plain recency.

    Source: GreedyDual-Size (Cao and Irani, USENIX Symposium on Internet Technologies and Systems 1997), Sec. 4.

    Args:
        spans: what compressed nodes hold; the tree's own table.
        clock: numbers accesses, in the order in which nodes note theirs.
    """

    def __init__(self, spans: Mapping[TreeNode, Span], clock: Callable[[], float]) -> None:
        self._spans = spans
        self._clock = clock
        self._times: list[float] = []
        self._levels: list[float] = [0.0]

    def get_priority(self, node: TreeNode) -> Priority:
        """Priority of a leaf; asked for every leaf of the tree at each eviction."""
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
