"""Compressed nodes that a key must not enter, because it would cut an unsplittable segment; subtrees that go."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot

from sgl_kvevict.guard import accounting
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.tree_shims import actions_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sgl_kvevict.cache.records import PrefixTable


class BlockingNodes:
    """Finds where a key must stop, and drops nodes that have no readers."""

    def __init__(self, cache: UnifiedRadixCache, table: PrefixTable, *, splittable: bool) -> None:
        self._cache = cache
        self._spans, self._owners = table.spans, table.packed
        self._splittable = splittable
        self._retired = secrets.token_hex()

    @accounting()
    def retire_compressed(self) -> None:
        """Drop all compressed nodes that nobody reads, and move the others out of sight of all prompts.

        Those that are read go to a namespace of their own, which no prompt can name. So locks, sizes and slots stay
        those of nodes in the tree, until :meth:`drop_unread` drops them.
        """
        cache = self._cache
        for top in [node for node in cache.root_node.children.values() if node in self._spans]:
            if self.drop_unread(top):
                continue
            salt = self._retired + secrets.token_hex()
            for node in subtree(top):
                # Taken out under the old name first: the salt is part of the name under which a parent knows its child.
                del node.parent.children[node.key.child_key(cache.page_size)]
                # A key of its own: the node may share the object with the request that inserted it, whose namespace
                # stays.
                node.key = node.key[:]
                node.key.cache_salt = salt
                node.parent.children[node.key.child_key(cache.page_size)] = node

    def is_retired(self, node: UnifiedTreeNode) -> bool:
        """Whether no prompt can find a node any more."""
        salt: str | None = node.key.cache_salt
        return salt is not None and salt.startswith(self._retired)

    def drop_subtree(self, node: UnifiedTreeNode) -> bool:
        """Drop a node and all its descendants; return False, dropping nothing, if the node has readers."""
        return not node.component_data[FULL].lock_ref and self.drop_unread(node)

    @accounting()
    def drop_unread(self, top: UnifiedTreeNode) -> bool:
        """Drop the nodes of a subtree that have no readers; return whether that was all of it."""
        # Leaves first: SGLang drops nothing else.
        for node in reversed(subtree(top)):
            if node.component_data[FULL].lock_ref > 0:  # a reader locks all nodes above its last one
                continue
            result = self._cache.tree_core.evict_device_leaf(node.id, is_write_back=False)
            while result.device_frees:  # SGLang asserts that both are empty
                kind, slots = result.device_frees.popitem()
                self._cache.components[kind].apply_component_action(FreeComponentDeviceSlot(slots, kind))
            while actions := actions_of(result):
                action = actions.pop()
                self._cache.components[action.component_type].apply_component_action(action)
        return not top.component_data[FULL].lock_ref

    def begins_compressed(self, key: RadixKey) -> bool:
        """Whether the first token of a key is in a span."""
        if len(key) == 0:
            return False
        return self._cache.root_node.children.get(key.child_key_at(0, self._cache.page_size)) in self._spans

    def num_shared(self, key: RadixKey) -> int:
        """How many of a key's tokens the tree has."""
        return sum(matched for _, matched in self._walk(key))

    def find(self, key: RadixKey) -> UnifiedTreeNode | None:
        """Return the node that a key must not enter (owner of an unsplittable segment), or None."""
        if self._splittable:
            return None
        last = self._cache.root_node
        for node, matched in self._walk(key):
            if matched < len(node.key):
                span = self._spans.get(node)
                return None if span is None or span.segment.splittable else self._owners[span.segment]
            last = node
        return self._owners[self._spans[last].segment] if self._spans.blocks(last) else None

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


def subtree(top: UnifiedTreeNode) -> list[UnifiedTreeNode]:
    """A node and all its descendants, level by level."""
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
