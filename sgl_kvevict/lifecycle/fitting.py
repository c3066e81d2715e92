"""Fits that are under way: one layer at a time, between two steps, after the segment was published."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from sgl_kvevict.compression import Compressor, PendingFit
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.spans import SpanTable


class Fits:
    """Segments that wait for their fit, in the order in which they were published.

    Each is known by the last node that holds a span of it, which stays that when nodes are cut. Readers need not be
    asked: no slot changes hands, and from its next forward on a reader finds other values in the same places.

    Args:
        spans: what nodes hold.
        compressor: whose store the segments are in; counts.
        guard: holds errors of a fit: its segment stays as it was selected.

    Attributes:
        on_ended: told the last node of a segment that is fitted, or stays as it was selected, if it is whole still.
    """

    def __init__(self, spans: SpanTable, compressor: Compressor, guard: Guard) -> None:
        self.on_ended: Callable[[Node], None] = lambda last: None
        self._spans = spans
        self._compressor = compressor
        self._guard = guard
        self._fits: OrderedDict[Node, PendingFit] = OrderedDict()
        self._num_slots: dict[PendingFit, int] = {}

    def __len__(self) -> int:
        return len(self._fits)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(fit.num_bytes for fit in self._fits.values())

    def add(self, last: Node, fit: PendingFit) -> None:
        """A segment was published whose last span a node holds."""
        self._fits[last] = fit
        self._num_slots[fit] = self._spans[last].segment.num_slots

    def clear(self) -> None:
        """The tree was flushed, or the model has other weights."""
        self._compressor.stats.fits_given_up += len(self._fits)
        self._fits.clear()
        self._num_slots.clear()

    def discard(self, node: Node) -> None:
        """A leaf leaves the tree, and still holds its span: what is above it of the same segment may be fitted."""
        fit = self._fits.pop(node, None)
        if fit is None:
            return
        above = None if node.parent is None else self._spans.get(node.parent)
        if node.parent is not None and above is not None and above.segment is self._spans[node].segment:
            self._fits[node.parent] = fit
        else:
            del self._num_slots[fit]
            self._compressor.stats.fits_given_up += 1

    def step(self) -> bool:
        """Fit one layer of the oldest segment; after the last one give it its values and biases.

        Returns:
            False: there is nothing to fit.
        """
        if not self._fits:
            return False
        begin = time.perf_counter()
        last, fit = next(iter(self._fits.items()))
        with self._guard.at(Place.FIT) as attempt:
            self._advance(last, fit)
        stats = self._compressor.stats
        if attempt.failed or fit.is_done:
            del self._fits[last]
            stats.fits_given_up += attempt.failed
            stats.fits += not attempt.failed
            if self._num_slots.pop(fit) == self._spans[last].segment.num_slots:
                self.on_ended(last)
        stats.fit_seconds += time.perf_counter() - begin
        return True

    def _advance(self, last: Node, fit: PendingFit) -> None:
        segment = self._spans[last].segment
        fit.step(segment)
        if fit.is_done:
            fit.apply(self._compressor.packer, segment, self._spans.ends_of(last))
