"""Ranges that are ready to be compressed but are still read by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType

from sglang.srt.mem_cache.radix_cache import TreeNode

from sgl_kvevict.compression import PromptObservation, ReaderObservation

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class PendingRange:
    """The uncompressed tokens above a node, and the observation to compress them with.

    Attributes:
        node: last node of the range; it ends at ``end``.
        end: logical position after the range's last token.
        observation: what the prefill left behind.
        reader: the request that was observed, as long as it lives; its own lock does not stand in the way.
    """

    node: TreeNode
    end: int
    observation: PromptObservation | ReaderObservation
    reader: ReferenceType[Req]


class PendingRanges:
    """At most one pending range per node, the newest one; the oldest go when their observations take too much memory.

    Args:
        max_bytes: memory for observations.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_node: dict[TreeNode, PendingRange] = {}
        self._bytes: dict[TreeNode, int] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that the observations take."""
        return sum(self._bytes.values())

    def add(self, pending: PendingRange) -> list[PendingRange]:
        """Keep a range until it is compressed or its node is dropped; return those that had to go."""
        self.discard(pending.node)
        self._by_node[pending.node] = pending
        self._bytes[pending.node] = pending.observation.num_bytes
        gone = []
        while self.num_bytes > self._max_bytes and self._by_node:
            oldest = next(iter(self._by_node.values()))
            gone.append(oldest)
            self.discard(oldest.node)
        return gone

    def discard(self, node: TreeNode) -> None:
        """Forget the range that ends at a node, if there is one."""
        self._by_node.pop(node, None)
        self._bytes.pop(node, None)

    def clear(self) -> None:
        """Forget all."""
        self._by_node.clear()
        self._bytes.clear()

    def __iter__(self) -> Iterator[PendingRange]:
        """Iterate over a snapshot, oldest first: compressing may remove ranges."""
        return iter(tuple(self._by_node.values()))

    def __len__(self) -> int:
        return len(self._by_node)
