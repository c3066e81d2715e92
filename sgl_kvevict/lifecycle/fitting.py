"""Fits values and biases of published segments: one layer at a time, between two steps."""

from __future__ import annotations

import time

from sgl_kvevict.guard import Place
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.table import SegmentFit


class Fits(Part):
    """Advances the fits of the table, oldest segment first. A fit belongs to the last node with a span of its segment.

    No slot changes, so readers need not be moved: their next forward reads the new values in the same slots.
    """

    def __init__(self, shared: Shared, ranges: Ranges) -> None:
        super().__init__(shared)
        self._ranges = ranges

    def __len__(self) -> int:
        return len(self._table.fits)

    @property
    def num_bytes(self) -> int:
        """Memory of unfinished fits."""
        return sum(each.fit.num_bytes for each in self._table.fits.values())

    def clear(self) -> None:
        """Count all fits as given up: the tree is flushed, or the weights change."""
        self._compressor.stats.fits_given_up += len(self)

    def step(self) -> bool:
        """Fit one layer of the oldest segment; write values and biases after its last layer. False: nothing to fit."""
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
            if fitted.num_slots == self._table.spans[last].segment.num_slots:  # the segment is still whole
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
