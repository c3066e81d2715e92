"""Saves prefixes: copies segments at the budget from the pool and hands them to the store's writer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_kvevict.cache.nodes import Node, namespace_of, path_to, tokens_of
from sgl_kvevict.cache.paths import Spans
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.events.types import Stored
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.segments import Compressor, SegmentPacker, Sources, View
from sgl_kvevict.store import Namespace, ReadAhead, SegmentRecord, StoreIdentity, WriteBehind


@dataclasses.dataclass
class StoreAccess:
    """The store as one server uses it.

    Attributes:
        reader: None: nothing is loaded.
        is_on: False once the weights have changed: the identity is that of the files.
    """

    identity: StoreIdentity
    writer: WriteBehind
    reader: ReadAhead | None = None
    is_on: bool = True


@dataclasses.dataclass(frozen=True)
class Leaving:
    """A copied segment that leaves the pool's device; ``copied`` is on it, complete once ``launched`` has happened."""

    namespace: Namespace
    copied: SegmentRecord
    launched: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        copied = self.copied
        rows = (copied.k, copied.v, copied.tail_k, copied.tail_v)
        of_draft = (copied.draft_k, copied.draft_v, copied.draft_tail_k, copied.draft_tail_v)
        return sum(part.nbytes for part in rows + of_draft if part is not None)

    def record(self) -> SegmentRecord:
        """The segment in host memory; called by another thread, because it waits for the device."""
        return self.copied if self.launched is None else _on_host(self.copied, self.launched)


@dataclasses.dataclass(frozen=True)
class Export:
    """What is copied of a path.

    Attributes:
        sources: consecutive ranges of it, which end where it ends.
        splittable: as in :class:`~sgl_kvevict.segments.Segment`, like ``state`` (its policy state).
        is_read: the order was measured by readers.
    """

    sources: Sources
    splittable: bool
    is_read: bool
    state: object | None

    @staticmethod
    def of(views: Sequence[View], geometry: KVGeometry) -> Export:
        """Consecutive views of packed segments, described by the last one."""
        last = views[-1].segment
        return Export(Sources(geometry, views), last.splittable, last.is_measured, last.policy_state)


def export_segment(
    node: Node, tree: TreePort, spans: Spans, packer: SegmentPacker, identity: StoreIdentity, num_tail: int
) -> Leaving | None:
    """Copy what a store keeps of the segment whose last span ``node`` holds; None: it is too short to be looked up.

    If other prompts branch off inside the segment before it, the part of that one on this path is copied, too. So a
    document behind a chat header is stored whole, and loading it needs no other prompt's segment. Up to ``num_tail``
    uncompressed tokens after it are copied if only one prompt continues there.
    """
    path = path_to(node)
    views = views_of(path, spans)
    if views[-1].end - views[0].start < identity.min_prefix_tokens:
        return None
    tail, export = _tail_of(node, spans, num_tail), Export.of(views, packer.geometry)
    if tail is None:
        return export_path(export, path, packer, identity)
    slots, tail_tokens = tree.token_slots([tail])[:num_tail], tokens_of([tail])[:num_tail]
    fields = {"tail_tokens": torch.tensor(tail_tokens, dtype=torch.int64)}
    fields["tail_k"], fields["tail_v"] = packer.token_rows(slots)
    if packer.drafts is not None:
        fields["draft_tail_k"], fields["draft_tail_v"] = packer.drafts.token_rows(slots)
    return export_path(export, path, packer, identity, **fields)


def export_path(
    export: Export, path: Sequence[Node], packer: SegmentPacker, identity: StoreIdentity, **tail: Tensor
) -> Leaving:
    """Copy the last tokens of a path, as if one segment held them.

    ``tail``: fields of the record that describe its tail.
    """
    tokens, namespace = tokens_of(path), identity.namespace(*namespace_of(path[-1]))
    sources, state = export.sources, export.state
    copied, shadow = packer.copy(sources), packer.copy_shadow(sources)
    (part,) = copied.parts
    assert state is None or isinstance(state, PolicyState)
    record = SegmentRecord(
        key=namespace.segment(tokens, sources.start),
        identity=identity.digest,
        start=sources.start,
        end=sources.end,
        splittable=export.splittable,
        is_read=export.is_read,
        created=time.time(),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        policy_state=None if state is None else state.threshold,
        keep_lens=part.keep_lens,
        positions=part.positions,
        k=part.k,
        v=part.v,
        order=copied.order,
        **({} if shadow is None else {f"draft_{name}": part for name, part in vars(shadow).items()}),
        **tail,
    )
    if not part.k.is_cuda:
        return Leaving(namespace, record, None)
    launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    launched.record()
    return Leaving(namespace, record, launched)


def views_of(path: Sequence[Node], spans: Spans) -> list[View]:
    """The last segment of a path, preceded by the parts of earlier segments that the path leaves in the middle."""
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


def _tail_of(node: Node, spans: Spans, num_tail: int) -> Node | None:
    """The uncompressed node after a segment, if it is the only child."""
    children = list(node.children.values())
    return children[0] if num_tail and len(children) == 1 and children[0] not in spans else None


class Saving:
    """Hands segments that have reached the budget to the store."""

    def __init__(
        self, tree: TreePort, table: PrefixTable, compressor: Compressor, guard: Guard, access: StoreAccess
    ) -> None:
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._compressor = compressor
        self._packer = compressor.packer
        self._guard = guard
        self._access = access

    def at_budget(self, last: Node) -> None:
        """Copy the segment whose last span the node ``last`` holds, and hand it to the writer.

        Waits only for small reads from the device, and only if a part of an earlier segment is copied with it. What a
        LoRA adapter computed is not stored: an adapter's id says nothing about its weights.
        """
        if not self._access.is_on or self._tree.adapter_of(namespace_of(last)) is not None:
            return
        with self._guard.at(Place.STORE):
            writer, packer, spans = self._access.writer, self._packer, self._spans
            segment = spans[last].segment
            num_bytes = packer.slot_bytes * segment.num_slots
            if not writer.has_room(num_bytes):
                self._table.listener.emit(Stored("", segment.num_tokens, 0, "too many segments wait"))
                return
            leaving = export_segment(
                last, self._tree, spans, packer, self._access.identity, self._compressor.stored_tail
            )
            if leaving is not None:
                writer.write(leaving.record, leaving.namespace, leaving.num_bytes)

    def between_steps(self) -> None:
        """Report the results of writes since the last call."""
        while self._access.writer.done:
            self._table.listener.emit(self._access.writer.done.popleft())


def _on_host(record: SegmentRecord, copied: torch.cuda.Event) -> SegmentRecord:
    """Copy all tensors of a record to host memory, on their own stream."""
    stream = torch.cuda.Stream(record.k.device)  # type: ignore[no-untyped-call]
    stream.wait_event(copied)
    with torch.cuda.stream(stream):
        moved: dict[str, Any] = {
            field.name: value.cpu()
            for field in dataclasses.fields(record)
            if isinstance(value := getattr(record, field.name), Tensor)
        }
    return dataclasses.replace(record, **moved)
