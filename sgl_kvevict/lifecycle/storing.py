"""The prefixes of a server that a store has: what goes there and when, and what comes from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.loading import Loading
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.lifecycle.stored import export_segment
from sgl_kvevict.prefix import SegmentPacker
from sgl_kvevict.store import StoreIdentity, WriteBehind, Written


def all_namespaces(extra_key: str | None) -> bool:
    """Whether what belongs to a namespace may be stored: all may."""
    return True


class StoredPrefixes:
    """Hands segments that came to the budget to a store, and knows who loads from there.

    Args:
        tree: whose nodes.
        spans: what they hold.
        store: where rows are.
        identity: of this server.
        writer: takes segments.
        guard: holds errors; the prefix is then not stored.
        num_tail: tokens of a prompt's tail, which are stored with what comes before them.
        loading: brings prefixes back; None: nothing does.
        keeps: whether a namespace, by its ``extra_key``, means the same to every server and at any time.

    Attributes:
        loading: see above.
        keeps: see above.
        is_on: False once the weights have changed: the identity is that of the files.
    """

    def __init__(
        self,
        tree: TreePort,
        spans: SpanTable,
        store: SegmentPacker,
        identity: StoreIdentity,
        writer: WriteBehind,
        guard: Guard,
        num_tail: int,
        loading: Loading | None,
        keeps: Callable[[str | None], bool] = all_namespaces,
    ) -> None:
        self.loading = loading
        self.keeps = keeps
        self.is_on = True
        self._listener = CacheListener()
        self._tree = tree
        self._spans = spans
        self._store = store
        self._identity = identity
        self._writer = writer
        self._guard = guard
        self._num_tail = num_tail

    @property
    def listener(self) -> CacheListener:
        """Told of what was stored and loaded."""
        return self._listener

    @listener.setter
    def listener(self, listener: CacheListener) -> None:
        self._listener = listener
        if self.loading is not None:
            self.loading.listener = listener

    def switch_off(self) -> None:
        """The weights are not those of the identity any more: nothing is stored or loaded from now on."""
        self.is_on = False
        if self.loading is not None:
            self.loading.clear()

    def close(self, timeout_s: float) -> int:
        """The server stops: nothing new is stored or loaded, and what waits is written.

        Args:
            timeout_s: how long that may take.

        Returns:
            Segments that were not written within this time.
        """
        self.switch_off()
        return self._writer.close(timeout_s)

    def on_budget(self, last: Node) -> None:
        """A segment has come to the budget; ``last`` is the last node with a span of it: copied, and then written.

        Waits for nothing but one small read from the device, and for that only if a beginning is stored with it.
        """
        if not self.is_on or not self.keeps(last.key.extra_key):
            return
        with self._guard.at(Place.STORE):
            segment = self._spans[last].segment
            row_bytes = self._store.k_arena.element_size() * self._store.geometry.head_dim
            num_bytes = 2 * row_bytes * segment.num_entries
            if not self._writer.has_room(num_bytes):
                self.listener.stored(Written("", segment.end - segment.start, 0, "too many segments wait"))
                return
            leaving = export_segment(last, self._tree, self._spans, self._store, self._identity, self._num_tail)
            if leaving is not None:
                self._writer.write(leaving.record, leaving.namespace, leaving.num_bytes)

    def between_steps(self) -> None:
        """Tell what was written since the last call."""
        while self._writer.done:
            self.listener.stored(self._writer.done.popleft())

    def state(self) -> dict[str, Any]:
        """What waits, and what was given up, for ``GET /server_info``."""
        loading = self.loading
        return {
            "is_on": self.is_on,
            "dropped": self._writer.num_dropped,
            "skipped": 0 if loading is None else loading.num_skipped,
            "waiting": self._writer.num_waiting + (0 if loading is None else loading.num_waiting),
        }
