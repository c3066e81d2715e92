"""Who is told when the cache changes. Without listeners the calls do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_kvevict.compression import Compression
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.store import Written

REFUSED_IN_USE = "in-use"
REFUSED_NOT_CACHED = "not-cached"
REFUSED_NO_ROOM = "no-room"
REFUSED_NO_MEMORY = "no-memory"
LOAD_LATE = "late"
LOAD_ERROR = "error"


class CacheListener:
    """Told of every change, on the scheduler's thread, right after it. This one does nothing with it."""

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        """Consecutive nodes, root side first, now hold spans of one new segment."""

    def split(self, upper: Node, lower: Node, position: int) -> None:
        """A span was cut at a logical position; ``lower`` is the node that held it."""

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        """A node left the tree and ``slots`` token slots came back at once; ``span`` is what it held."""

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        """The segment of ``owner`` gave ``released`` token slots back."""

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        """Slots were short: the segment of ``owner`` gave up what it needed least, and ``released`` token slots."""

    def scored(self, start: int, end: int, seconds: float) -> None:
        """Extra forwards scored the tokens ``[start, end)``."""

    def refused(self, reason: str, num_tokens: int) -> None:
        """Tokens could not be compressed (``in-use``), cached (``not-cached``), scored (``no-room``) or observed.

        The last is ``no-memory``: what was observed of them takes more than is allowed.
        """

    def stored(self, written: Written) -> None:
        """A segment was written to the store, was there already, or could not be written."""

    def loaded(self, key: str, start: int, end: int) -> None:
        """The tokens ``[start, end)`` of a path came from the store, compressed."""

    def load_failed(self, reason: str, error: str) -> None:
        """A request goes on without the store: it came too ``late``, or there was an ``error``."""

    def cleared(self) -> None:
        """The whole cache was flushed."""

    def between_steps(self) -> None:
        """The scheduler is between two steps; called at every turn of its loop, so it must be cheap."""


class ListenerGroup(CacheListener):
    """Tells several listeners, in order. One that fails is skipped: what it watches went on.

    Args:
        listeners: whom to tell.
        guard: holds what they raise.
    """

    def __init__(self, listeners: Sequence[CacheListener], guard: Guard) -> None:
        self.listeners = tuple(listeners)
        self._guard = guard

    def _tell(self, tell: Callable[[CacheListener], None]) -> None:
        for listener in self.listeners:
            with self._guard.at(Place.LISTENER):
                tell(listener)

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        """Tell all; see :meth:`CacheListener.compressed`."""
        self._tell(lambda listener: listener.compressed(nodes, compression))

    def split(self, upper: Node, lower: Node, position: int) -> None:
        """Tell all; see :meth:`CacheListener.split`."""
        self._tell(lambda listener: listener.split(upper, lower, position))

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        """Tell all; see :meth:`CacheListener.dropped`."""
        self._tell(lambda listener: listener.dropped(node, span, slots))

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        """Tell all; see :meth:`CacheListener.repacked`."""
        self._tell(lambda listener: listener.repacked(owner, segment, released))

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        """Tell all; see :meth:`CacheListener.squeezed`."""
        self._tell(lambda listener: listener.squeezed(owner, segment, released))

    def scored(self, start: int, end: int, seconds: float) -> None:
        """Tell all; see :meth:`CacheListener.scored`."""
        self._tell(lambda listener: listener.scored(start, end, seconds))

    def refused(self, reason: str, num_tokens: int) -> None:
        """Tell all; see :meth:`CacheListener.refused`."""
        self._tell(lambda listener: listener.refused(reason, num_tokens))

    def stored(self, written: Written) -> None:
        """Tell all; see :meth:`CacheListener.stored`."""
        self._tell(lambda listener: listener.stored(written))

    def loaded(self, key: str, start: int, end: int) -> None:
        """Tell all; see :meth:`CacheListener.loaded`."""
        self._tell(lambda listener: listener.loaded(key, start, end))

    def load_failed(self, reason: str, error: str) -> None:
        """Tell all; see :meth:`CacheListener.load_failed`."""
        self._tell(lambda listener: listener.load_failed(reason, error))

    def cleared(self) -> None:
        """Tell all; see :meth:`CacheListener.cleared`."""
        self._tell(lambda listener: listener.cleared())

    def between_steps(self) -> None:
        """Tell all; see :meth:`CacheListener.between_steps`."""
        self._tell(lambda listener: listener.between_steps())
