"""The full-attention part of SGLang's unified tree, with nodes that hold spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, FullComponent

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction, ComponentAction
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

FULL = ComponentType.FULL


class SpanComponent(FullComponent):
    """Full attention whose values may be spans.

    A compressed node keeps its key; its value is a filler of zeros (the padding slot) of the same length, so lengths
    stay logical everywhere in SGLang's code. Its sizes ask :meth:`reclaimable_value_len`: token slots held.

    Attributes:
        cache: the tree; SGLang sets it.
    """

    cache: KVEvictTree

    def reclaimable_value_len(self, node: UnifiedTreeNode) -> int:
        """Token slots that a node carries in the accounting."""
        spans = self.cache.spans
        return spans[node].charged_slots if node in spans else self.value_len(node)

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """A node was cut: both halves keep their part of the value, and of the span."""
        super().redistribute_on_node_split(new_parent, child)
        self.cache.on_split(new_parent, child)

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """A leaf is dropped: hand its slots to SGLang, which frees them; the same for what a repack saves.

        Returns:
            Token slots that come back on the device, and on the host.
        """
        charged = self.reclaimable_value_len(node)
        slots = self.cache.on_drop(node)
        if slots is None:
            released: tuple[int, int] = super().evict_component(node, device_frees, host_frees, cache_actions, target)
            return released
        self.tree_core.adjust_component_size(node.id, FULL, -charged)
        if slots.numel():
            device_frees[FULL].append(slots)
        return slots.numel(), 0
