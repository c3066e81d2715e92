"""Walks over SGLang's radix tree."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sgl_kvevict.errors import InvariantError
from sgl_kvevict.prefix import Span


class WalkableTree(RadixCache):
    """Radix tree whose nodes and paths can be walked.

    Attributes:
        spans: what the compressed nodes hold.
    """

    spans: dict[TreeNode, Span]

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes below the root, in no particular order."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def path(self, node: TreeNode) -> list[TreeNode]:
        """Nodes from below the root to ``node``."""
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def waterline(self, path: list[TreeNode]) -> int:
        """Tokens of a path that its spans stand for."""
        return sum(len(node.key) for node in path if node in self.spans)

    def node_ending_at(self, path: list[TreeNode], end: int) -> TreeNode:
        """Return the node of the path that ends at ``end``, splitting one if needed."""
        position = 0
        for node in path:
            position += len(node.key)
            if position == end:
                return node
            if position > end:
                return self._split_node(node.key, node, len(node.key) - (position - end))
        raise InvariantError(f"the path has {position} tokens, expected at least {end}")

    def unsplittable_at(self, key: RadixKey) -> TreeNode | None:
        """Return the unsplittable node inside which a key ends or diverges, if there is one."""
        node, rest = self.root_node, key
        while len(rest) and (child := node.children.get(rest.child_key(self.page_size))) is not None:
            matched = child.key.match(rest, page_size=self.page_size)
            if matched < len(child.key):
                span = self.spans.get(child)
                return child if span is not None and not span.segment.splittable else None
            node, rest = child, rest[matched:]
        return None
