"""Who is told when the cache changes. Without observers the calls do nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.compression import Compression
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.store import Written

REFUSED_IN_USE = "in-use"
REFUSED_NOT_CACHED = "not-cached"
REFUSED_NO_ROOM = "no-room"
REFUSED_NO_MEMORY = "no-memory"
LOAD_LATE = "late"
LOAD_ERROR = "error"


class CacheObserver:
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
