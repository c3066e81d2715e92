"""Fits values and biases of published segments: one layer at a time, between two steps."""

from __future__ import annotations

import time

from sgl_kvevict.guard import Place
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.table import SegmentFit


class Fits(Part):
    """Advances the fits of the table, in the order in which their segments were published.

    Readers need not be moved: no slot changes hands, and from its next forward on a reader finds other values in the
    same places.

    Args:
        shared: the table; a fit belongs to the last node with a span of its segment.
        ranges: knows what follows when a segment at the budget is complete.
    """

    def __init__(self, shared: Shared, ranges: Ranges) -> None:
        super().__init__(shared)
        self._ranges = ranges

    def __len__(self) -> int:
        return len(self._table.fits)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(each.fit.num_bytes for each in self._table.fits.values())

    def clear(self) -> None:
        """The tree is to be flushed, or the model has other weights."""
        self._compressor.stats.fits_given_up += len(self)

    def step(self) -> bool:
        """Fit one layer of the oldest segment; after the last one, write its values and biases.

        Returns:
            False: there is nothing to fit.
        """
        oldest = self._table.fits.oldest()
        if oldest is None:
            return False
        begin = time.perf_counter()
        last, fitted = oldest
        with self._guard.at(Place.FIT) as attempt:
            self._advance(last, fitted)
        stats = self._compressor.stats
        if attempt.failed or fitted.fit.is_done:
            self._table.fits.take(last)
            stats.fits_given_up += attempt.failed
            stats.fits += not attempt.failed
            if fitted.num_slots == self._table.spans[last].segment.num_slots:  # it is whole still
                self._ranges.at_budget(last)
        stats.fit_seconds += time.perf_counter() - begin
        return True

    def _advance(self, last: Node, fitted: SegmentFit) -> None:
        spans = self._table.spans
        segment = spans[last].segment
        fitted.fit.step(segment)
        if fitted.fit.is_done:
            ends = [spans[node].end for node in spans.nodes_of(last, segment)]
            fitted.fit.apply(self._packer, segment, ends)
