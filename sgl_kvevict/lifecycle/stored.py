"""Segments that leave the pool for a store, and come back into other slots of this or of another server's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from sgl_kvevict.errors import StoreError
from sgl_kvevict.guard import accounting
from sgl_kvevict.lifecycle.nodes import Key, Node, length_of, path_to, tokens_of
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.readers import LiveReaders
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.prefix import Segment, SegmentPacker, View
from sgl_kvevict.store import Namespace, SegmentRecord, StoreIdentity


@dataclasses.dataclass(frozen=True)
class Leaving:
    """A segment whose rows were copied, on its way to a store.

    Attributes:
        namespace: whose it is.
        num_bytes: of keys and values.
        record: waits for what the device has not finished yet, and returns the segment; for another thread to call.
    """

    namespace: Namespace
    num_bytes: int
    record: Callable[[], SegmentRecord]


def export_segment(
    node: Node, tree: TreePort, spans: SpanTable, store: SegmentPacker, identity: StoreIdentity, num_tail: int
) -> Leaving | None:
    """Copy what a store keeps of a segment.

    What comes before it on the path, and belongs to a segment that other prompts go on with, is copied with it: so a
    document behind a chat header is stored whole, and a server that has only this path needs no other prompt's segment.

    Args:
        node: the last one that holds a span of it.
        tree: whose node it is.
        spans: what nodes hold.
        store: where its rows are.
        identity: of this server.
        num_tail: uncompressed tokens after it to take along, if only one prompt goes on there.

    Returns:
        None: it is shorter than what prompts look for.
    """
    path = path_to(node)
    segment, views = spans[node].segment, _views_of(path, spans)
    start, end = views[0].start, views[-1].end
    if end - start < identity.min_prefix_tokens:
        return None
    tokens, namespace = tokens_of(path), namespace_of(node.key, identity)
    copied = store.copy(views)
    tail = _tail_of(node, spans, num_tail)
    tail_k, tail_v = store.token_rows(tree.token_slots([tail])[:num_tail]) if tail is not None else (None, None)
    state = segment.policy_state
    assert state is None or isinstance(state, PolicyState)
    record = SegmentRecord(
        key=namespace.segment(tokens, start),
        identity=identity.digest,
        start=start,
        end=end,
        splittable=segment.splittable,
        is_read=segment.is_measured,
        created=time.time(),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        keep_lens=copied.keep_lens,
        positions=copied.positions,
        k=copied.k,
        v=copied.v,
        worth=copied.worth,
        policy_state=None if state is None else state.threshold,
        biases=copied.biases,
        tail_tokens=None if tail is None else torch.tensor(list(tail.key.token_ids[:num_tail]), dtype=torch.int64),
        tail_k=tail_k,
        tail_v=tail_v,
    )
    num_bytes = (copied.k.numel() + (0 if tail_k is None else tail_k.numel())) * copied.k.element_size() * 2
    if not copied.k.is_cuda:
        return Leaving(namespace, num_bytes, lambda: record)
    launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    launched.record()
    return Leaving(namespace, num_bytes, lambda: _on_host(record, launched))


def _views_of(path: Sequence[Node], spans: SpanTable) -> list[View]:
    """The last segment of a path, and of those right before it the parts that the path leaves in the middle."""
    views: list[View] = []
    for node in path:
        span = spans[node]
        if views and views[-1].segment is span.segment:
            views[-1] = View(span.segment, views[-1].start, span.end)
        else:
            views.append(View(span.segment, span.start, span.end))
    first = len(views) - 1
    while first and not views[first - 1].is_whole:
        first -= 1
    return views[first:]


def _tail_of(node: Node, spans: SpanTable, num_tail: int) -> Node | None:
    """The uncompressed node after a segment, if there is one and only one: what all questions of it share."""
    children = list(node.children.values())
    return children[0] if num_tail and len(children) == 1 and children[0] not in spans else None


def namespace_of(key: Key, identity: StoreIdentity) -> Namespace:
    """Names of what the tenant of a node's tokens may find."""
    return identity.namespace(key.extra_key, key.cache_salt)


class Adoption:
    """Puts stored segments into the tree, as if they had been compressed here.

    Args:
        tree: whose nodes and slots.
        spans: what the nodes hold.
        ranges: installs them.
        readers: who would follow, where a stored segment takes the place of uncompressed nodes.
        store: writes rows.
    """

    def __init__(
        self, tree: TreePort, spans: SpanTable, ranges: Ranges, readers: LiveReaders, store: SegmentPacker
    ) -> None:
        self._tree = tree
        self._spans = spans
        self._ranges = ranges
        self._readers = readers
        self._store = store

    def adopt(self, record: SegmentRecord, extra_key: str | None, cache_salt: str | None) -> int:
        """Give a stored segment slots and nodes.

        Args:
            record: of this server's identity.
            extra_key: namespace in which it was found.
            cache_salt: likewise.

        Returns:
            How many of its last tokens came into the tree: of its beginning stays what the tree has compressed. 0, and
            nothing has changed but what gave way: there were no slots; or the tree has all of it, or what comes before
            it is not there or not compressed, or somebody reads exactly what it would take the place of.

        Raises:
            StoreError: the record's entries do not fit this server's pool.
        """
        geometry = self._store.geometry
        if tuple(record.keep_lens.shape) != (geometry.num_layers, geometry.num_kv_heads):
            raise StoreError(f"a segment of {tuple(record.keep_lens.shape)} runs")
        if record.biases is not None and not self._store.has_biases:
            raise StoreError("a fitted segment, and nothing is fitted here")
        if geometry.slots_for(record.num_entries) > record.end - record.start:
            raise StoreError(f"a segment of {record.num_entries} entries for {record.end - record.start} tokens")
        tokens: list[int] = record.tokens.tolist()
        there = self._tree.find(tokens, extra_key, cache_salt)
        waterline = self._spans.waterline(there)
        if record.splittable and record.start < waterline < record.end:
            record = record.after(waterline)
        fewest = -self._tree.largest(-record.num_entries)  # of all ranks, as are the slots
        if fewest == 0 or not self._fits(record, there):
            return 0  # before others give way for it
        slots = self._tree.alloc(self._tree.largest(geometry.slots_for(record.num_entries), record.start, record.end))
        if slots is None:
            return 0
        if self._install(record, tokens, slots, extra_key, cache_salt):
            return record.end - record.start
        self._tree.free(slots)
        return 0

    def adopt_tail(self, record: SegmentRecord, extra_key: str | None, cache_salt: str | None) -> bool:
        """Give the tail of a segment that is in the tree slots and a node; False: it has none, or there is no place."""
        if record.tail_tokens is None:
            return False
        assert record.tail_k is not None and record.tail_v is not None
        slots = self._tree.alloc(record.tail_tokens.numel())
        if slots is None:
            return False
        path: list[int] = record.tokens.tolist()
        tokens: list[int] = path + record.tail_tokens.tolist()
        with accounting():
            there = self._tree.find(tokens, extra_key, cache_salt)
            is_free = length_of(there) == len(path) == self._spans.waterline(there)
            if not is_free or self._tree.add(tokens, extra_key, cache_salt, slots) is None:
                self._tree.free(slots)
                return False
            self._store.place_tokens(slots, record.tail_k, record.tail_v)
        return True

    @accounting()
    def _install(
        self,
        record: SegmentRecord,
        tokens: Sequence[int],
        slots: Tensor,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> bool:
        there = self._tree.find(tokens, extra_key, cache_salt)
        if not self._fits(record, there):
            return False
        ordinary = [node for node in there if node not in self._spans]
        if not record.splittable and not self._is_whole(ordinary):
            return False
        readers = self._readers.movable(ordinary[0]) if ordinary else []
        if readers is None:
            return False
        last = self._tree.add(tokens, extra_key, cache_salt)
        if last is None:
            return False
        freed = self._tree.token_slots(ordinary) if ordinary else slots[:0]
        nodes = [node for node in path_to(last) if node not in self._spans]
        self._ranges.adopt(nodes, self._segment(record, slots), freed, readers)
        return True

    def _is_whole(self, nodes: Sequence[Node]) -> bool:
        """Whether all who find consecutive nodes, the last of a path, find all of them: nobody ends there or goes on.

        Who reads one of them now would read the beginning of what cannot be cut.
        """
        return all(
            self._tree.num_locks(node) == 0 and all(child is below for child in node.children.values())
            for node, below in zip_longest(nodes, nodes[1:])
        )

    def _fits(self, record: SegmentRecord, there: Sequence[Node]) -> bool:
        """Whether a segment goes on beyond what the tree has of its path, from where that is compressed."""
        return length_of(there) < record.end and self._spans.waterline(there) == record.start

    def _segment(self, record: SegmentRecord, slots: Tensor) -> Segment:
        segment = self._store.new_segment(
            slots,
            record.keep_lens,
            record.positions,
            record.start,
            record.end,
            splittable=record.splittable,
            worth=record.worth,
        )
        self._store.place(segment, record.k, record.v, record.biases)
        segment.is_measured = record.is_read
        if record.policy_state is not None:
            segment.policy_state = PolicyState(record.policy_state.to(slots.device))
        return segment


def _on_host(record: SegmentRecord, copied: torch.cuda.Event) -> SegmentRecord:
    """The record with all tensors in host memory, moved on a stream of their own."""
    stream = torch.cuda.Stream(record.k.device)  # type: ignore[no-untyped-call]
    stream.wait_event(copied)
    with torch.cuda.stream(stream):
        moved: dict[str, Any] = {
            field.name: value.cpu()
            for field in dataclasses.fields(record)
            if isinstance(value := getattr(record, field.name), Tensor)
        }
    return dataclasses.replace(record, **moved)
