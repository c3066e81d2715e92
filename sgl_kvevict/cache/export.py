"""Copies what the pool holds of a path into the record of one segment, which then leaves for a tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.nodes import Node, namespace_of, path_to, tokens_of
from sgl_kvevict.cache.records import Spans
from sgl_kvevict.copies import CopiedRows, EvictedPart
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import View
from sgl_kvevict.segments.sources import Source
from sgl_kvevict.store.identity import StoreIdentity
from sgl_kvevict.store.segment_file import SegmentRecord


def export_segment(
    node: Node,
    spans: Spans,
    packer: SegmentPacker,
    identity: StoreIdentity,
    complements: Complements | None = None,
) -> SegmentRecord | None:
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
) -> SegmentRecord:
    """Copy consecutive ranges, which end where a path ends, as if the segment of the last one held them all.

    The copy is on the pool's device; on a GPU it is complete once what is launched has run. ``evicted`` and ``parts``
    are as in :class:`SegmentRecord`.
    """
    tokens, namespace, last = tokens_of(path), identity.namespace(*namespace_of(path[-1])), sources[-1]
    is_cut = packer.geometry.has_windows and last.kept.numbers is not None  # of a range that is packed on its way
    return SegmentRecord(
        key=namespace.segment(tokens, sources[0].start),
        identity=identity.digest,
        start=sources[0].start,
        end=sources[-1].end,
        splittable=last.range.segment.splittable if isinstance(last.range, View) else not is_cut,
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        kept=packer.copy(sources),
        shadow=packer.copy_shadow(sources),
        evicted=evicted,
        parts=parts,
    )


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
