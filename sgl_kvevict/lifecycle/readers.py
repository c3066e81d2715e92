"""Who reads which path now: what may be exchanged under whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from weakref import WeakSet

from sgl_kvevict.lifecycle.nodes import Node, Reader, path_to
from sgl_kvevict.lifecycle.ports import TreePort


class LiveReaders:
    """Requests and scoring passes that looked for their prompt and have not let go.

    What they read may be replaced between two of their steps: from the next forward on they read the new span. Not so
    if somebody locks it whom nobody knows here, or who asked to read what is uncompressed (``exact``).

    Args:
        tree: whose nodes they lock.
    """

    def __init__(self, tree: TreePort) -> None:
        self._tree = tree
        self._live: WeakSet[Reader] = WeakSet()
        self._exact: WeakSet[Reader] = WeakSet()

    def __iter__(self) -> Iterator[Reader]:
        return iter(tuple(self._live))

    def add(self, reader: Reader) -> None:
        """A reader looked for its prompt, maybe again."""
        self._live.add(reader)

    def discard(self, reader: Reader) -> None:
        """A reader let go."""
        self._live.discard(reader)

    def make_exact(self, reader: Reader) -> None:
        """A request wants to read no compressed entry."""
        self._exact.add(reader)

    def is_exact(self, reader: Reader) -> bool:
        """Whether a request wants to read no compressed entry."""
        return reader in self._exact

    def movable(self, node: Node) -> list[Reader] | None:
        """Return who reads a node, if all of them would follow when it is compressed; None if somebody would not."""
        readers = [reader for reader in self if (last := self._tree.locked_by(reader)) and node in path_to(last)]
        if len(readers) != self._tree.num_locks(node) or any(map(self.is_exact, readers)):
            return None
        return readers

    def movable_nodes(self) -> list[Node]:
        """Nodes that are locked, by readers who would follow, together with all nodes above them; root side first."""
        paths = [(reader, path_to(last)) for reader in self if (last := self._tree.locked_by(reader)) is not None]
        counts = Counter(node for _, path in paths for node in path)
        fixed = {node for reader, path in paths if self.is_exact(reader) for node in path}
        movable: dict[Node, None] = {}
        for _, path in paths:
            for node in path:
                if node in movable:
                    continue
                if node in fixed or counts[node] != self._tree.num_locks(node):
                    break
                movable[node] = None
        return list(movable)
