"""Current cache sizes, for metrics and the event socket, too; the key ``kvevict`` of ``GET /server_info``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_kvevict.events.totals import Gauges, Pool
from sgl_kvevict.guard import Place
from sgl_kvevict.sglang_adapter.long_prompts import admission_of
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController


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


def after_env_vars(_result: None, controller: SchedulerInternalStateController, state: dict[str, Any]) -> None:
    """Hook after SGLang filled a scheduler's state: add the key ``kvevict`` (plain values) if our tree is in use."""
    tree = controller.scheduler.tree_cache
    if not isinstance(tree, KVEvictTree):
        return
    shown: dict[str, Any] = {}
    # The key is there even if what follows fails, with the errors below.
    state["kvevict"] = shown
    with tree.guard.at(Place.STATE):
        shown |= cache_state(tree)
    guard = tree.guard
    shown["errors"] = {place.value: count for place, count in guard.errors.items() if count}
    shown["attempts"] = {place: guard.attempts[Place(place)] for place in shown["errors"]}  # all failed, or a few?
    if tree.ranks.size > 1:
        shown["ranks"] = rank_states(tree)  # outside the guard: every rank must get here


def cache_state(tree: KVEvictTree) -> dict[str, Any]:
    """Return totals, gauges and settings of the cache, as plain values."""
    gauges, totals = read_gauges(tree), tree.prefixes.totals
    # A request owns what was allocated for it behind the part that the tree protects; slots that neither has are
    # leaked.
    owned = sum(
        req.kv.kv_allocated_len - req.kv.cache_protected_len for req in tree.prefixes.readers if req.kv.holds_kv
    )
    state: dict[str, Any] = {
        "policy": "none",
        **msgspec.structs.asdict(totals),
        **msgspec.structs.asdict(gauges),
        "full_tokens": gauges.pool.full,
        "free_slots": gauges.pool.free,
        "evictable_slots": tree.evictable_size(),
        "protected_slots": tree.protected_size(),
        "total_slots": gauges.pool.total,
        "max_sharers": tree.prefixes.max_sharers,
        "leaked_slots": gauges.pool.private - owned,
    }
    del state["pool"]  # its numbers are there by names of their own
    if tree.compressor.policy.compresses:
        state |= tree.compressor.state()
    if stored := tree.prefixes.store_state():
        state["store"] = stored
    return state


def rank_states(tree: KVEvictTree) -> list[dict[str, int]]:
    """Return token slots by holder, and the number of nodes, per tensor-parallel rank; all must be equal.

    SGLang calls all ranks at the same point.
    """
    allocator = tree.slot_allocator
    numbers = {
        "free_slots": allocator.available_size(),
        "evictable_slots": tree.evictable_size(),
        "protected_slots": tree.protected_size(),
        "nodes": len(tree.nodes()),
    }
    return [dict(zip(numbers, values, strict=True)) for values in tree.ranks.gather(list(numbers.values()))]
