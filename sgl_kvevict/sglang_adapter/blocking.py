"""Compressed nodes that a key must not enter: unsplittable ones it would cut, and those of old weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot

from sgl_kvevict.guard import accounting
from sgl_kvevict.sglang_adapter.span_component import FULL

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sgl_kvevict.cache.records import PrefixTable


class BlockingNodes:
    """Finds where a key must stop, and drops blocking nodes that have no readers."""

    def __init__(self, cache: UnifiedRadixCache, table: PrefixTable, *, splittable: bool) -> None:
        self._cache = cache
        self._spans = table.spans
        self._stale = table.stale
        self._splittable = splittable

    def add_compressed(self) -> None:
        """Mark all compressed nodes as stale, because the weights changed; drop those without readers."""
        root = self._cache.root_node
        for node in [node for node in self._spans if node.parent is root and node not in self._stale]:
            self._stale.put(node, value=True)
        self.drop_unread()

    def drop_unread(self) -> None:
        """Drop stale subtrees without readers."""
        for node, _ in self._stale:
            if node in self._stale:
                self.drop_subtree(node)

    @accounting()
    def drop_subtree(self, node: UnifiedTreeNode) -> bool:
        """Drop a node and all its descendants; return False, dropping nothing, if the node has readers."""
        if node.component_data[FULL].lock_ref > 0:
            return False
        subtree = [node]
        for step in subtree:
            subtree.extend(step.children.values())
        for step in reversed(subtree):
            result = self._cache.tree_core.evict_device_leaf(step.id, is_write_back=False)
            while result.device_frees:  # SGLang asserts that both are empty
                kind, slots = result.device_frees.popitem()
                self._cache.components[kind].apply_component_action(FreeComponentDeviceSlot(slots, kind))
            while result.cache_actions:
                action = result.cache_actions.pop()
                self._cache.components[action.component_type].apply_component_action(action)
        return True

    def begins_compressed(self, key: RadixKey) -> bool:
        """Whether the first token of a key is in a span."""
        if len(key) == 0:
            return False
        return self._cache.root_node.children.get(key.child_key_at(0, self._cache.page_size)) in self._spans

    def num_shared(self, key: RadixKey) -> int:
        """How many of a key's tokens the tree has."""
        return sum(matched for _, matched in self._walk(key))

    def find(self, key: RadixKey) -> UnifiedTreeNode | None:
        """Return the node that a key must not enter (stale, or owner of an unsplittable segment), or None."""
        if self._splittable and not self._stale:
            return None
        last = self._cache.root_node
        for node, matched in self._walk(key):
            if node in self._stale:
                return node
            if matched < len(node.key):
                span = self._spans.at(node)
                return None if span is None or span.segment.splittable else self._spans.owner_of(node)
            last = node
        return self._spans.owner_of(last) if self._spans.blocks(last) else None

    def _walk(self, key: RadixKey) -> Iterator[tuple[UnifiedTreeNode, int]]:
        """Nodes that share tokens with a key, root side first, and how many."""
        page_size = self._cache.page_size
        node, position = self._cache.root_node, 0
        while position < len(key):
            node = node.children.get(key.child_key_at(position, page_size))
            if node is None:
                return
            matched = node.key.match_at(key, position, page_size=page_size)
            yield node, matched
            position += matched
            if matched < len(node.key):
                return
