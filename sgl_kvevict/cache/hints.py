"""What clients ask for the prefix of a prompt: that it stays for a while (``retain``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sgl_kvevict.cache.nodes import NamespaceKey, Node, length_of, namespace_of, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.pressure import Pressure
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable, Retention
from sgl_kvevict.cache.resize import Resizer, is_launched
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.request import Retain
from sgl_kvevict.segments import Segment

MAX_NODES = 1024
"""Nodes that may be retained, of one namespace at most half of them: each admission of a request looks at all."""
MS = 1000
"""Milliseconds of a second."""


class Hints:
    """Follows retained prefixes.

    A retained node is not dropped, and its segment does not shrink below its share, until the time has passed. If a
    segment also has other tokens, it keeps at least as many slots as the retained ones take at that share. All retained
    nodes together keep at most ``retain_share`` of the pool's slots, those of a namespace half of that. A hint that
    would exceed it is not followed. If retained prefixes keep more later, retentions end, the one with the least time
    left first.

    Admission counts the slots that are kept as taken. So requests wait, or are retracted, as if another request held
    them. But a request that runs alone gets them, and so does a prefill that was admitted before they were kept: no
    request fails, or waits for ever, for another one's hint. What ends first gives way first.

    Ranks of tensor parallelism have clocks of their own. The largest reading of all ranks is the common one: it is
    exchanged in each turn in which anything is retained, and with each new retention.

    Attributes:
        is_on: whether prefixes can be retained: they leave the pool in the order of :class:`CostAwareRecency`, can be
            split, and have token slots alone, no windows or states.
        on_lowered: called with each node that is no longer retained.
    """

    def __init__(
        self,
        tree: TreePort,
        table: PrefixTable,
        readers: ReaderTable,
        config: KVEvictConfig,
        resizer: Resizer,
        pressure: Pressure,
        num_slots: int,
    ) -> None:
        self.is_on = False
        self.on_lowered: Callable[[Node], None] = lambda node: None
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._retained = table.retained
        self._readers = readers
        self._config = config
        self._resizer = resizer
        self._pressure = pressure
        self._most_slots = int(config.retain_share * num_slots)
        self._most_running = 1
        self._own_ms = 0

    # ---- retain -----------------------------------------------------------------------------------------------

    def retain(self, path: Sequence[Node], num_tokens: int, hint: Retain) -> int:
        """Retain the first ``num_tokens`` tokens of a path: a prompt without its tail.

        A node that is retained already stays as long as the longer of both hints says, and keeps the larger share.

        Returns:
            ``num_tokens``; 0: they are too few, too many slots would be kept, or nothing can be retained here.
        """
        if not self.is_on or not self._resizer.is_long_enough(num_tokens):
            return 0
        until = self._tree.largest(self._own_ms) + int(hint.seconds * MS)
        share = hint.share if hint.share is not None else self._config.budget
        path = path_to(self._resizer.node_ending_at(path, num_tokens))
        before = {node: self._retained.get(node) for node in path}
        for node, old in before.items():
            new = Retention(until, share)
            self._put(node, new if old is None else Retention(max(old.until, until), max(old.share, share)))
        if self._exceeding() is None:
            return num_tokens
        for node, old in before.items():
            self._put(node, old)
        return 0

    def between_steps(self, now: float) -> None:
        """End retentions whose time has passed, or that keep too much; ``now``: seconds of this rank's clock."""
        self._own_ms = int(now * MS)
        if not self._retained:
            return
        now_ms = self._tree.largest(self._own_ms)
        for node, retention in self._retained:
            if retention.until <= now_ms:
                self._put(node, None)
        while (namespace := self._exceeding()) is not None:
            self._end_first(namespace)

    def clear(self) -> None:
        """End all retentions: the tree is flushed, or the weights have changed."""
        for node, _ in self._retained:
            self._put(node, None)

    def give_way(self) -> bool:
        """End the retention with the least time left, for a request that runs alone; False: none, or others run."""
        if not self._retained or not self.is_yielding:
            return False
        self._end_first(None)
        return True

    @contextmanager
    def yielding(self, most_running: int) -> Iterator[None]:
        """Meanwhile retained prefixes give way if at most ``most_running`` requests run, instead of at most one."""
        self._most_running = most_running
        try:
            yield
        finally:
            self._most_running = 1

    def reclaimable(self) -> int:
        """Reclaimable token slots, minus those that retained nodes without readers keep; may be negative.

        SGLang's accounting counts the latter as evictable. Nothing is subtracted while retained prefixes give way.
        """
        if not self._retained:
            return self._pressure.reclaimable()
        if self.is_yielding:
            return self._pressure.reclaimable(with_retained=True)
        movable, held = set(self._readers.movable_nodes()), self._tree.held
        locked = set() if held is None else set(path_to(held))
        nodes = [node for node, _ in self._retained if self._tree.num_locks(node) == 0 and node not in locked]
        kept = sum(self._kept(node, may_shrink=self._is_movable(node, movable)) for node in nodes)
        return self._pressure.reclaimable() - kept

    def retained_slots(self) -> int:
        """Token slots that retained prefixes keep."""
        return sum(self._kept(node) for node, _ in self._retained)

    @property
    def is_yielding(self) -> bool:
        """Whether retained prefixes give way when slots are short."""
        return self._readers.num_running <= self._most_running

    def _put(self, node: Node, retention: Retention | None) -> None:
        """Set or remove a node's retention."""
        if retention is not None:
            self._retained.put(node, retention)
        elif self._retained.take(node) is not None:
            self._pressure.lower(node)
            self.on_lowered(node)

    def _end_first(self, namespace: NamespaceKey | None) -> None:
        """End the retention with the least time left, of a namespace (None: of all)."""
        of_it = [(node, each) for node, each in self._retained if namespace in (None, namespace_of(node))]
        first = min(retention.until for _, retention in of_it)
        for node, retention in of_it:
            if retention.until == first:
                self._put(node, None)

    def _exceeding(self) -> NamespaceKey | None:
        """The namespace that keeps the most if it, or all of them, keep too much; None: they do not."""
        slots, nodes = Counter[NamespaceKey](), Counter[NamespaceKey]()
        for node, _ in self._retained:
            slots[namespace_of(node)] += self._kept(node)
            nodes[namespace_of(node)] += 1
        for counts, most in ((slots, self._most_slots), (nodes, MAX_NODES)):
            namespace, count = max(counts.items(), key=lambda item: item[1], default=(None, 0))
            if counts.total() > most or count > most // 2:
                return namespace
        return None

    def _kept(self, node: Node, *, may_shrink: bool = True) -> int:
        """Token slots that a retained node keeps, or the segment that it stands for, once it has shrunk all it may.

        ``may_shrink``: False if a reader keeps a segment in place from shrinking.
        """
        span = self._spans.of(node)
        if span is None:
            return len(node.key)
        segment = span.segment
        if not span.is_packed:
            is_last = may_shrink and self._table.in_place[segment] is node
            return len(node.key) - (self._released_of(segment, node) if is_last else 0)
        if not span.is_owner:
            return 0
        retained = [each for each in self._table.nodes_of(segment) if each in self._retained]
        return min(segment.num_slots - self._released_of(segment, node), length_of(retained))

    def _released_of(self, segment: Segment, node: Node) -> int:
        """Token slots that a segment can release; ``node`` would stand for it in ``PrefixTable.shrinking``."""
        if node in self._table.shrinking:
            return self._pressure.reclaimable_of(segment)
        is_ranked = segment in self._table.wanted and is_launched(segment)
        return segment.num_slots - self._resizer.slots_at(segment) if is_ranked else 0

    def _is_movable(self, node: Node, movable: set[Node]) -> bool:
        """Whether a segment in place that ends with a node without readers can shrink: no reader above prevents it."""
        path = path_to(node)
        span = self._spans.of(node)
        if span is None or span.is_packed:
            return True
        is_whole = all(self._tree.num_locks(each) == 0 for each in self._table.nodes_of(span.segment))
        locked = [each for each in path if self._tree.num_locks(each) > 0]
        return is_whole and (not locked or locked[-1] in movable)
