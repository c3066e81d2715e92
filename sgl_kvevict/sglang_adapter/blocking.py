"""Compressed nodes that others must not match: unsplittable ones where a key diverges, and those of other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


class BlockingNodes:
    """Finds the node that a key must not enter, and drops what stands in the way once nobody reads it.

    Args:
        tree: whose nodes.
    """

    def __init__(self, tree: KVEvictTree) -> None:
        self._tree = tree
        self._stale: dict[TreeNode, None] = {}  # in order, which must be the same on every rank

    def clear(self) -> None:
        """The tree was flushed."""
        self._stale.clear()

    def discard(self, node: TreeNode) -> None:
        """A node was dropped."""
        self._stale.pop(node, None)

    def add_compressed(self) -> None:
        """The weights changed: nothing compressed until now may be matched again. What still has readers goes later."""
        root = self._tree.root_node
        self._stale |= dict.fromkeys(node for node in self._tree.spans if node.parent is root)
        self.drop_unread()

    def drop_unread(self) -> None:
        """Drop the compressed paths of other weights that nobody reads any more."""
        for node in tuple(self._stale):
            self.drop_subtree(node)

    def drop_subtree(self, node: TreeNode) -> bool:
        """Drop a node with everything below it; False, and nothing dropped, if it is read."""
        if node.lock_ref > 0:
            return False
        subtree = [node]
        for step in subtree:
            subtree.extend(step.children.values())
        for step in reversed(subtree):
            self._tree._drop(step)
        return True

    def find(self, key: RadixKey) -> TreeNode | None:
        """Return the node that a key must not enter, if there is one."""
        tree = self._tree
        if self._stale and len(key):
            first = tree.root_node.children.get(key.child_key(tree.page_size))
            if first in self._stale:
                return first
        if tree.compressor is None or tree.compressor.policy.splittable:
            return None
        return tree.unsplittable_at(key)
