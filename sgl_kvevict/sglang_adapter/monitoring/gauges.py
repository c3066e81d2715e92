"""Current cache sizes for metrics, ``GET /server_info`` and the event socket."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sgl_kvevict.events.totals import Gauges, Pool
from sgl_kvevict.sglang_adapter.long_prompts import admission_of

if TYPE_CHECKING:
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


def read_gauges(tree: KVEvictTree) -> Gauges:
    """Return the current sizes; walks the spans on the host, without reading the device."""
    allocator, prefixes = tree.slot_allocator, tree.prefixes
    host = prefixes.host.segments
    admission = admission_of(tree.token_to_kv_pool_allocator)
    long = None if admission is None else admission.prefilling
    free, held = allocator.available_size(), tree.held_slots()
    owned = list(prefixes.table.packed)
    readers = [tree.port.num_locks(node) for node in tree.spans]
    span_slots = sum(segment.num_slots for segment in owned)
    span_tokens = sum(span.num_tokens for span in tree.spans.values())
    logical_tokens = held - span_slots + span_tokens
    geometry, entries = tree.packer.geometry, Counter[int]()
    # Numbers that the host has: a metric must not wait for the device.
    for segment in owned:
        entries.update(segment.entries_by_bits)
    return Gauges(
        pool=Pool(allocator.size, free, span_slots, held - span_slots, allocator.size - free - held),
        logical_tokens=logical_tokens,
        held_slots=held,
        tokens_per_slot=logical_tokens / held if held else 1.0,
        span_tokens=span_tokens,
        span_slots=span_slots,
        slot_bytes=geometry.slot_bytes,
        held_bytes=held * geometry.slot_bytes,
        span_bytes=span_slots * geometry.slot_bytes,
        beside_bytes=tree.packer.beside_bytes(entries.total()),
        share_of_bytes=span_slots / span_tokens if span_tokens else 1.0,
        share_of_entries=entries.total() / (span_tokens * geometry.num_runs) if span_tokens else 1.0,
        entries_16=entries[16],
        entries_4=entries[4],
        spans=len(readers),
        segments=len(owned),
        dead_entries=sum(segment.num_entries - segment.num_live_entries for segment in owned),
        pending_ranges=len(prefixes.table.open),
        shared_spans=sum(count > 1 for count in readers),
        readers=sum(readers),
        readers_per_span=sum(readers) / max(len(readers), 1),
        max_readers_per_span=max(readers, default=0),
        observation_bytes=prefixes.table.observation_bytes,
        host_bytes=host.num_blocks * host.block_bytes,
        host_used_bytes=host.used_bytes,
        host_segments=len(host),
        evicted_entries_kept=sum(part.num_entries for part in host.evicted),
        evicted_bytes_kept=sum(len(part.blocks) for part in host.evicted) * host.block_bytes,
        long_prompt_tokens=0 if long is None else len(long.full_untruncated_fill_ids),
        long_prompt_computed=0 if long is None else long.prefix_len,
    )
