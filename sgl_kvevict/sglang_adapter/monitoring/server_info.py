"""The key ``kvevict`` of ``GET /server_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_kvevict.events.totals import by_name
from sgl_kvevict.guard import Place
from sgl_kvevict.sglang_adapter.monitoring.gauges import read_gauges

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


def after_env_vars(_result: None, controller: SchedulerInternalStateController, state: dict[str, Any]) -> None:
    """Hook after SGLang filled a scheduler's state: add the key ``kvevict`` (plain values) if our tree is in use."""
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

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
        **by_name(totals),
        **by_name(gauges),
        "full_tokens": gauges.pool.full,
        "free_slots": gauges.pool.free,
        "evictable_slots": tree.evictable_size(),
        "protected_slots": tree.protected_size(),
        "total_slots": gauges.pool.total,
        "max_sharers": tree.prefixes.max_sharers,
        "leaked_slots": gauges.pool.private - owned,
    }
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
        "nodes": sum(1 for _ in tree.nodes()),
    }
    return [dict(zip(numbers, values, strict=True)) for values in tree.ranks.gather(list(numbers.values()))]
