"""The sliding-window part of SGLang's unified tree, beside full-attention nodes that hold spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.cache_action import ComponentAction
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, SWAComponent

from sgl_kvevict.guard import accounting
from sgl_kvevict.sglang_adapter.span_component import FULL

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sgl_kvevict.lifecycle.table import Spans

SWA = ComponentType.SWA
_OWN = "kvevict_own"
"""Mark in a node's metadata: no full-attention slot is paired with its window slots, so they are released by number."""


class TakeWindow(ComponentAction, frozen=True):  # type: ignore[call-arg]  # a msgspec structure
    """A compressed node takes the window slots of a request that computed the same tokens again.

    Attributes:
        node_id: the node; it has none.
        incoming: [num_tokens], int64, the request's full-attention slots, which are released.
    """

    node_id: int
    incoming: torch.Tensor
    component_type: ComponentType = SWA


class FreeWindow(ComponentAction, frozen=True):  # type: ignore[call-arg]  # likewise
    """Release window slots that no full-attention slot is paired with.

    Attributes:
        slots: [num_tokens], int64, of the sliding-window pool.
    """

    slots: torch.Tensor
    component_type: ComponentType = SWA


class SpanAwareSWA(SWAComponent):
    """Window slots of nodes, also of those whose full-attention slots were exchanged for a span.

    SGLang finds the window slots of a node through the full-attention slots that they were allocated with. A
    compressed node has none of those any more, so its window slots are its own: they stay when it is compressed, go
    when SGLang takes its window away, and are replaced when a request that computed the tokens again is inserted.

    Args:
        cache: the tree; its ``spans`` say which nodes are compressed.
        params: SGLang's construction parameters.
    """

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._spans: Spans = cache.spans

    @accounting()
    def keep_window(self, node: UnifiedTreeNode) -> None:
        """A node's full-attention slots are about to be exchanged for a span: its window slots stay, as its own."""
        data = node.component_data[SWA]
        if data.value is not None:
            data.metadata[_OWN] = True
            self.cache.token_to_kv_pool_allocator.clear_full_to_swa_mapping(node.component_data[FULL].value)

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """A node was cut: both halves keep their part of the window, on the same terms."""
        super().redistribute_on_node_split(new_parent, child)
        if _OWN in child.component_data[SWA].metadata:
            new_parent.component_data[SWA].metadata[_OWN] = True

    @accounting()
    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """A node gives up its window.

        Returns:
            Window slots that come back on the device, and on the host.
        """
        data = node.component_data[SWA]
        if EvictLayer.DEVICE not in target or _OWN not in data.metadata:
            freed: tuple[int, int] = super().evict_component(node, device_frees, host_frees, cache_actions, target)
            return freed
        num_slots = int(self.reclaimable_value_len(node))
        cache_actions.append(FreeWindow(data.value))
        self.tree_core.adjust_component_size(node.id, SWA, -num_slots)
        del data.metadata[_OWN]
        data.value = None
        return num_slots, 0

    def _recover_from_incoming(
        self,
        *,
        node: UnifiedTreeNode,
        incoming_full: torch.Tensor,
        start: int,
        end: int,
        result: InsertResult,
        cache_actions: list[CacheAction | ComponentAction],
    ) -> None:
        """A request computed tokens again whose window is gone; where they are compressed only its window is taken."""
        if node in self._spans:
            cache_actions.append(TakeWindow(node.id, incoming_full))
            return
        super()._recover_from_incoming(
            node=node, incoming_full=incoming_full, start=start, end=end, result=result, cache_actions=cache_actions
        )

    @accounting()
    def apply_component_action(self, action: ComponentAction) -> None:
        """Do what an insertion or an eviction decided."""
        allocator = self.cache.token_to_kv_pool_allocator
        if isinstance(action, FreeWindow):
            allocator.swa_attn_allocator.free(action.slots)
        elif isinstance(action, TakeWindow):
            slots = allocator.translate_loc_from_full_to_swa(action.incoming).long()
            allocator.clear_full_to_swa_mapping(action.incoming)
            allocator.free_full_segment(action.incoming, start_pos=0)
            self.tree_core.node_by_id(action.node_id).component_data[SWA].metadata[_OWN] = True
            self.tree_core.set_component_device_value(action.node_id, SWA, slots)
        else:
            super().apply_component_action(action)

    def window_slots(self, row: torch.Tensor, path: list[UnifiedTreeNode], start: int) -> torch.Tensor:
        """Find the window slots of a request's tokens from ``start`` on.

        Args:
            row: [num_tokens], the request's row from ``start`` on: full-attention slots, 0 where it reads spans.
            path: nodes that the request reads, root side first.
            start: logical position of the row's first token.

        Returns:
            [num_tokens], int64; 0 where the window is gone.
        """
        slots: torch.Tensor = self.cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[row.long()]
        end = sum(len(node.key) for node in path)
        for node in reversed(path):
            if end <= start:
                break
            first = end - len(node.key)
            own = node.component_data[SWA].value if node in self._spans else None
            if own is not None:
                skipped = max(0, start - first)
                slots[first + skipped - start : end - start] = own[skipped:]
            end = first
        return slots
