"""The protocol that this package calls: the tree that holds the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from sgl_kvevict.cache.nodes import NamespaceKey, Node, Reader


class TreePort(Protocol):
    """The tree: nodes, locks, slots and rows."""

    @property
    def lookahead(self) -> int:
        """Tokens after a path that are looked up to find it: 1 if keys are pairs of tokens, else 0."""

    def adapter_of(self, namespace: NamespaceKey) -> str | None:
        """Id of the LoRA adapter with which a namespace's prefixes were computed; None: the model alone."""

    def num_locks(self, node: Node) -> int:
        """Number of a node's locks; a lock on a node is one on all nodes above it."""

    def locked_by(self, reader: Reader) -> Node | None:
        """Last node of the path that a reader locks; None if there is none."""

    def cut(self, node: Node, end: int) -> Node:
        """Split a node, inside which the logical position ``end`` lies, and return the upper part."""

    def token_slots(self, nodes: Sequence[Node]) -> Tensor:
        """[num_tokens], int64, ordinary slots of consecutive uncompressed nodes, in token order."""

    def hold_span(self, node: Node) -> None:
        """Mark a node as holding a span instead of ordinary slots."""

    def charge(self, node: Node, num_slots: int) -> None:
        """Add ``num_slots`` (may be negative) to a node's slots in the accounting."""

    def free(self, token_slots: Tensor) -> None:
        """Give token slots ([n], int64) back to the pool."""

    def alloc(self, num_slots: int) -> Tensor | None:
        """Take token slots out of the pool; prefixes shrink or are dropped if too few are free.

        Returns:
            [num_slots], int64; None: not all can be had, and nothing has shrunk or was dropped, unless an error of the
            policy was held meanwhile.
        """

    def holding(self, path: Sequence[Node]) -> AbstractContextManager[None]:
        """Meanwhile no node of a path is dropped for slots; its segments may shrink."""

    @property
    def held(self) -> Node | None:
        """Last node of the path that :meth:`holding` holds; None: it holds none."""

    @property
    def num_available(self) -> int:
        """Free token slots, and those that can be released for others at any time, as admission counts them.

        While :meth:`holding` holds a path, only what its segments release when they shrink is counted of it.
        """

    def find(self, tokens: Sequence[int], namespace: NamespaceKey) -> list[Node]:
        """Nodes of the longest path that matches ``tokens``; a node that diverges inside is cut there.

        The last ``lookahead`` tokens are only looked up.
        """

    def add(self, tokens: Sequence[int], namespace: NamespaceKey) -> Node | None:
        """Add the missing nodes of the path of ``tokens``, which end as in :meth:`find`; they get spans.

        Returns its last node, or None if it may not be cached.
        """

    def slots_of(self, reader: Reader, start: int, end: int) -> Tensor:
        """[end - start], int64, ordinary slots of a reader's tokens ``[start, end)``, including uncached ones."""

    def clear_slots(self, reader: Reader, end: int) -> None:
        """From the reader's next forward on, its tokens ``[0, end)`` are read from spans."""

    def largest(self, value: int, *same: int) -> int:
        """The largest ``value`` of all tensor-parallel ranks; InvariantError if ``same`` differ between them."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers between tensor-parallel ranks, equally many on each; the result is by rank."""
