"""What the cache holds now, in numbers: for metrics, ``GET /server_info`` and the inspection socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvevict.events.questions import Gauges, Pool

if TYPE_CHECKING:
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


def read_gauges(tree: KVEvictTree) -> Gauges:
    """Return what the cache holds now; a walk over the spans on the host, nothing is read from the device."""
    allocator = tree.slot_allocator
    free = allocator.available_size()
    held = tree.held_slots()
    span_tokens = compressed_slots = segments = dead_entries = shared = readers = max_readers = 0
    for node, span in tree.spans.items():
        span_tokens += span.num_tokens
        if span.is_owner:
            segments += 1
            compressed_slots += span.segment.num_slots
            dead_entries += span.segment.num_entries - span.segment.num_live_entries
        shared += tree.num_readers(node) > 1
        readers += tree.num_readers(node)
        max_readers = max(max_readers, tree.num_readers(node))
    full = held - compressed_slots
    return Gauges(
        pool=Pool(allocator.size, free, compressed_slots, full, allocator.size - free - held),
        logical_tokens=full + span_tokens,
        span_tokens=span_tokens,
        spans=len(tree.spans),
        segments=segments,
        dead_entries=dead_entries,
        pending_ranges=len(tree.manager.table.pending),
        shared_spans=shared,
        readers=readers,
        max_readers=max_readers,
        scoring_jobs=0 if tree.manager.scoring is None else tree.manager.scoring.num_waiting,
        observation_bytes=tree.manager.observation_bytes,
    )
