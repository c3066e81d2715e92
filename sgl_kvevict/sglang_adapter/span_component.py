"""Full-attention component of SGLang's unified tree, for nodes that may hold spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType, FullComponent

from sgl_kvevict.cache.cache import PrefixCache
from sgl_kvevict.cache.nodes import NodeSet
from sgl_kvevict.cache.recency import CostAwareRecency, NodeHeap
from sgl_kvevict.cache.records import Spans
from sgl_kvevict.guard import accounting
from sgl_kvevict.sglang_adapter.tree_shims import newest_names

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import NodeId
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

FULL = ComponentType.FULL


@newest_names
class SpanComponent(FullComponent):
    """Full attention whose values may be spans.

    A compressed node keeps its key; its value is zeros (the padding slot) of the same length, so lengths stay logical
    in SGLang's code. Sizes come from :meth:`reclaimable_value_len`, in token slots held.
    """

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._prefixes: PrefixCache = cache.prefixes
        self._spans: Spans = self._prefixes.spans
        self._order: CostAwareRecency | None = None
        self._heap: NodeHeap | None = None
        self._wanted = 0

    def reclaimable_value_len(self, node: UnifiedTreeNode) -> int:
        """Token slots that a node has in the accounting."""
        span = self._spans.get(node)
        if span is not None:
            return span.charged_slots
        value: torch.Tensor | None = node.component_data[FULL].value
        return 0 if value is None else value.numel()

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """Divide a node's value, and its span, between both halves."""
        super().redistribute_on_node_split(new_parent, child)
        self._prefixes.table.split(new_parent, child)

    @accounting()
    def evict_component(
        self, node: UnifiedTreeNode, device_frees: dict[ComponentType, list[torch.Tensor]], *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Drop a leaf; its slots, and those saved by a repack, are appended to ``device_frees``.

        Returns the token slots released on the device, and on the host.
        """
        is_short = any(part.is_evict_device_ongoing for part in self.tree_core.components)  # else it is being replaced
        if self._order is not None and is_short:
            self._order.raise_level(self._order.get_priority(node))
        if is_short:
            # Before the node is dropped, while its entries still have slots to copy from.
            self._prefixes.host.leaving(node)
        # Read first: afterwards the node has no span, and the owner's charge may have moved to another node.
        charged = self.reclaimable_value_len(node)
        slots = self._prefixes.dropped(node)
        if slots is None:
            released: tuple[int, int] = super().evict_component(node, device_frees, *args, **kwargs)
            return released
        self.tree_core.adjust_component_size(node.id, FULL, -charged)
        if slots.numel():
            # SGLang releases them together with the rest of the eviction.
            device_frees[FULL].append(slots)
        return slots.numel(), 0

    # ---- the order in which leaves go -------------------------------------------------------------------------

    def order_by(self, order: CostAwareRecency) -> None:
        """Evict leaves in this order from now on; called again after the tree was emptied.

        Our heap persists between evictions; SGLang builds its own from all leaves each time.
        """
        self._order = self.tree_core.eviction_strategy = order
        if self.session_ref_eviction_strategy is None:  # with sessions SGLang orders the leaves
            self.tree_core.evictable_device_leaves = leaves = NodeSet(self.tree_core.evictable_device_leaves)
            self._heap = NodeHeap(leaves, order.get_priority)

    def evict_device_start(self, request_cnt: int) -> None:
        """Begin an eviction of ``request_cnt`` token slots."""
        self._wanted = request_cnt
        if self._heap is None:
            super().evict_device_start(request_cnt)
        self.is_evict_device_ongoing = True

    def evict_device_next_node(self, tracker: dict[ComponentType, int], *args: Any, **kwargs: Any) -> NodeId | None:
        """Shrink prefixes, or return the next leaf to drop; neither if enough slots came back or nothing is left."""
        if tracker[FULL] >= self._wanted:
            return None
        top = None if self._heap is None else self._heap.top()
        num_released = self._prefixes.pressure.reclaim(None if top is None else top[0])
        if num_released:
            # SGLang counts a changed tracker as progress, and asks again: the next leaf is compared with what resizes
            # cost then.
            tracker[FULL] += num_released
            return None
        if self._heap is None:
            return super().evict_device_next_node(tracker, *args, **kwargs)
        leaf = self._heap.pop()
        return None if leaf is None else leaf.id

    def evict_device_end(self) -> None:
        """End the eviction."""
        if self._heap is None:
            super().evict_device_end()
        self.is_evict_device_ongoing = False
