"""What a live tree tells about itself: plain numbers for ``GET /server_info`` and for the sockets of ``events``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_kvevict.prefix import Span
from sgl_kvevict.prefix.kept import kept_share

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

NUM_KEPT_BINS = 200


def add_state(_result: None, controller: SchedulerInternalStateController, state: dict[str, Any]) -> None:
    """Hook after SGLang filled one scheduler's internal state: add the key ``kvevict`` when our tree serves.

    Args:
        controller: SGLang's controller; holds the live scheduler.
        state: the dictionary being filled; values must be plain numbers, strings, lists and dictionaries.
    """
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

    tree = controller.scheduler.tree_cache
    if not isinstance(tree, KVEvictTree):
        return
    state["kvevict"] = cache_state(tree)
    if tree.compressor is not None and tree.compressor.config.expose_kept and tree.spans:
        largest = max(tree.spans.values(), key=lambda span: span.num_tokens)
        state["kvevict"]["kept"] = kept_map(largest, NUM_KEPT_BINS)


def cache_state(tree: KVEvictTree) -> dict[str, Any]:
    """Return what the cache holds, in plain numbers."""
    allocator = tree.token_to_kv_pool_allocator
    spans = tree.spans.values()
    owned = sum(
        req.kv.kv_allocated_len - req.kv.cache_protected_len for req in tree.requests.values() if req.kv.holds_kv
    )
    compressed_slots = sum(span.charged_slots for span in spans)
    state: dict[str, Any] = {
        "policy": "none",
        "spans": len(spans),
        "segments": sum(span.is_owner for span in spans),
        "compressed_tokens": sum(span.num_tokens for span in spans),
        "compressed_slots": compressed_slots,
        "full_tokens": tree.evictable_size_ + tree.protected_size_ - compressed_slots,
        "free_slots": allocator.available_size(),
        "evictable_slots": tree.evictable_size_,
        "protected_slots": tree.protected_size_,
        "total_slots": allocator.size,
        "max_sharers": tree.max_sharers,
        "pending_ranges": len(tree.pending),
    }
    held = state["free_slots"] + state["evictable_slots"] + state["protected_slots"] + owned
    state["leaked_slots"] = allocator.size - held
    if tree.compressor is not None:
        state |= tree.compressor.state()
    return state


def kept_map(span: Span, num_bins: int) -> dict[str, Any]:
    """Return which tokens of a span each (layer, head) kept, in plain numbers.

    Reads the device (a host sync): only for somebody who asked.

    Args:
        span: a live span.
        num_bins: resolution; one bin a token if the span has fewer tokens.

    Returns:
        ``start`` and ``end`` (logical positions), ``num_bins``, and ``share``: for each (layer, head), layer-major,
        the share of tokens kept in each bin.
    """
    num_bins = min(num_bins, span.num_tokens)
    share = [[round(value, 3) for value in row] for row in kept_share(span, num_bins).tolist()]
    return {"start": span.start, "end": span.end, "num_bins": num_bins, "share": share}
