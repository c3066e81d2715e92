"""Copies what the pool holds of a path into the record of one segment, which then leaves for a tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.nodes import Node, namespace_of, path_to, tokens_of
from sgl_kvevict.cache.records import Spans
from sgl_kvevict.copies import CopiedRows, EvictedPart
from sgl_kvevict.segments import SegmentPacker, Source, View
from sgl_kvevict.store import Namespace, SegmentRecord, StoreIdentity


@dataclass(frozen=True)
class Leaving:
    """A copied segment that leaves the pool's device.

    Attributes:
        copied: on that device; complete once ``launched`` has happened.
        launched: None: the device is the CPU, and the copy is complete.
    """

    namespace: Namespace
    copied: SegmentRecord
    launched: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for part in self.copied.tensors.values())

    def record(self) -> SegmentRecord:
        """The segment in the host's memory; called by another thread, because it waits for the device."""
        if self.launched is None:
            return self.copied
        stream = torch.cuda.Stream(self.copied.kept.rows.k.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self.launched)
        with torch.cuda.stream(stream):
            return self.copied.with_tensors({name: part.cpu() for name, part in self.copied.tensors.items()})


def export_segment(
    node: Node,
    spans: Spans,
    packer: SegmentPacker,
    identity: StoreIdentity,
    complements: Complements | None = None,
) -> Leaving | None:
    """Copy what a store keeps of the segment whose last span ``node`` holds; None: it is too short to be looked up.

    Parts of earlier segments that its path leaves in the middle are copied with it, and what was evicted if there are
    ``complements``.
    """
    path = path_to(node)
    views = views_of(path, spans)
    if views[-1].end - views[0].start < identity.min_prefix_tokens:
        return None
    sources = [Source(packer.geometry, view) for view in views]
    return export(sources, path, packer, identity, None if complements is None else complements.copied(views))


def export(
    sources: Sequence[Source],
    path: Sequence[Node],
    packer: SegmentPacker,
    identity: StoreIdentity,
    evicted: CopiedRows | None = None,
    parts: Sequence[EvictedPart] = (),
) -> Leaving:
    """Copy consecutive ranges, which end where a path ends, as if the segment of the last one held them all.

    ``evicted`` and ``parts`` are as in :class:`SegmentRecord`.
    """
    tokens, namespace = tokens_of(path), identity.namespace(*namespace_of(path[-1]))
    copied, last = packer.copy(sources), sources[-1]
    is_cut = packer.geometry.has_windows and last.kept.numbers is not None  # of a range that is packed on its way
    record = SegmentRecord(
        key=namespace.segment(tokens, sources[0].start),
        identity=identity.digest,
        start=sources[0].start,
        end=sources[-1].end,
        splittable=last.range.segment.splittable if isinstance(last.range, View) else not is_cut,
        tokens=torch.tensor(tokens, dtype=torch.int64),
        kept=copied,
        shadow=packer.copy_shadow(sources),
        evicted=evicted,
        parts=parts,
    )
    if not copied.rows.k.is_cuda:
        return Leaving(namespace, record, None)
    launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # The writer's thread waits for this, and not for all that the device has to do.
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
