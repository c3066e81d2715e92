"""Sliding-window component of SGLang's unified tree, for nodes whose full attention may be a span."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.cache_action import ComponentAction
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, SWAComponent

from sgl_kvevict.guard import accounting
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.tree_shims import apply_later, newest_names

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction
    from sglang.srt.mem_cache.unified_cache.components.base import InternalStateBackup, NodeId
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sgl_kvevict.cache.records import Spans

SWA = ComponentType.SWA
_OWN = "kvevict_own"
"""Key in a node's metadata: its window slots are not paired with full-attention slots; released by number."""


class TakeWindow(ComponentAction, frozen=True):  # type: ignore[call-arg]  # a msgspec structure
    """Give a compressed node without a window the window slots of a request that recomputed its tokens."""

    node_id: int
    incoming: torch.Tensor  # [num_tokens], int64, the request's full-attention slots, which are released
    component_type: ComponentType = SWA


class FreeWindow(ComponentAction, frozen=True):  # type: ignore[call-arg]  # likewise
    """Release window slots that are not paired with full-attention slots."""

    slots: torch.Tensor  # [num_tokens], int64, of the sliding-window pool
    component_type: ComponentType = SWA


@newest_names
class SpanAwareSWA(SWAComponent):
    """Window slots of nodes, compressed ones included.

    SGLang finds window slots through the full-attention slots allocated with them. A compressed node has no such slots,
    so it owns its window slots. They stay when it is compressed, and go when SGLang evicts its window. A request that
    recomputed the tokens replaces them when it is inserted.
    """

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._spans: Spans = cache.spans

    @accounting()
    def keep_window(self, node: UnifiedTreeNode) -> None:
        """Make a node the owner of its window slots, just before its full-attention slots are replaced by a span."""
        data = node.component_data[SWA]
        if data.value is not None:
            data.metadata[_OWN] = True
            # Else the release of the full-attention slots would release the window's, too.
            self.cache.token_to_kv_pool_allocator.clear_full_to_swa_mapping(node.component_data[FULL].value)

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """Divide a node's window slots between both halves; both own theirs if the node did."""
        super().redistribute_on_node_split(new_parent, child)
        if _OWN in child.component_data[SWA].metadata:
            new_parent.component_data[SWA].metadata[_OWN] = True

    @accounting()
    def evict_component(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Evict a node's window; returns the window slots released on the device, and on the host."""
        data = node.component_data[SWA]
        # By name: the two supported versions pass the target at different places.
        given = signature(super().evict_component).bind(node, *args, **kwargs).arguments
        if EvictLayer.DEVICE not in given.get("target", EvictLayer.DEVICE) or _OWN not in data.metadata:
            freed: tuple[int, int] = super().evict_component(node, *args, **kwargs)
            return freed
        num_slots = int(self.reclaimable_value_len(node))
        apply_later(self, FreeWindow(data.value), given)
        self.tree_core.adjust_component_size(node.id, SWA, -num_slots)
        del data.metadata[_OWN]
        data.value = None
        return num_slots, 0

    def evict_device_start(self, request_cnt: int) -> None:
        """Begin to evict windows, the least recently used first."""
        self._wanted = request_cnt
        super().evict_device_start(request_cnt)

    def evict_device_next_node(
        self, tracker: dict[ComponentType, int], *args: Any, **kwargs: Any
    ) -> NodeId | InternalStateBackup | None:
        """Evict the next window; with sessions, begin again at the end as long as that finds any.

        SGLang evicts nodes without a session first. A node whose last session leaf goes in the second half becomes one
        of these, and SGLang alone would end without it, short of what it has promised.
        """
        before = tracker[SWA]
        found = super().evict_device_next_node(tracker, *args, **kwargs)
        if found is None and tracker[SWA] == before < self._wanted and self.tree_core.enable_session_radix_cache:
            self.evict_device_end()
            super().evict_device_start(self._wanted)
            found = super().evict_device_next_node(tracker, *args, **kwargs)
        return found

    def _recover_from_incoming(
        self,
        *,
        node: UnifiedTreeNode,
        incoming_full: torch.Tensor,
        cache_actions: list[CacheAction | ComponentAction],
        **kwargs: Any,
    ) -> None:
        """Restore a missing window from a request that recomputed the tokens; compressed nodes take only the window."""
        if node in self._spans:
            # SGLang would give the node the request's full-attention slots, and it has a span there.
            cache_actions.append(TakeWindow(node.id, incoming_full))
            return
        super()._recover_from_incoming(node=node, incoming_full=incoming_full, cache_actions=cache_actions, **kwargs)

    @accounting()
    def apply_component_action(self, action: ComponentAction) -> None:
        """Apply an action of an insertion or eviction."""
        allocator = self.cache.token_to_kv_pool_allocator
        if isinstance(action, FreeWindow):
            allocator.swa_attn_allocator.free(action.slots)
        elif isinstance(action, TakeWindow):
            # Looked up before the mapping is cleared, and cleared before the slots go: their release would take the
            # window's with them.
            slots = allocator.translate_loc_from_full_to_swa(action.incoming).long()
            allocator.clear_full_to_swa_mapping(action.incoming)
            allocator.free_full_segment(action.incoming, start_pos=0)
            self.tree_core.node_by_id(action.node_id).component_data[SWA].metadata[_OWN] = True
            self.tree_core.set_component_device_value(action.node_id, SWA, slots)
        else:
            super().apply_component_action(action)

    def window_slots(self, row: torch.Tensor, path: list[UnifiedTreeNode], start: int) -> torch.Tensor:
        """[num_tokens], int64, window slots of a request's tokens from position ``start`` on; 0 if the window is gone.

        Args:
            row: [num_tokens], the request's row from ``start`` on: full-attention slots, 0 for tokens in spans.
            path: nodes that the request reads, root side first.
            start: logical position of the row's first token.
        """
        slots: torch.Tensor = self.cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[row.long()]
        end = sum(len(node.key) for node in path)
        # From the end: a window reaches back a little, so most of a long path is never looked at.
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
