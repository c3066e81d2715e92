"""Moves prefixes between the pool and the host's memory: out when they are dropped, in when a prompt is admitted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvevict_kernels.row_sizes import ROWS_PER_SLOT
from sgl_kvevict.cache.adoption import Adoption, Prompt
from sgl_kvevict.cache.complements import parts_of
from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.export import export, views_of
from sgl_kvevict.cache.nodes import Node, Reader, length_of, namespace_of, path_to, tokens_of
from sgl_kvevict.guard import Place
from sgl_kvevict.segments.prompt_observation import CacheObservation
from sgl_kvevict.segments.segment import Segment, View
from sgl_kvevict.segments.sources import Source, TokenRange
from sgl_kvevict.store.host import HostSegments
from sgl_kvevict.store.segment_file import SegmentRecord

MIN_TOKENS = 64
"""Fewer tokens are computed again: looking them up would take as long."""


class HostMemory:
    """Holds what left the pool, compressed; a prompt finds it in the scheduling step that admits it.

    Tensor-parallel ranks drop and admit the same, and their segments take equally many blocks, so that each holds its
    part of the same prefixes.

    Attributes:
        num_left: prefixes that the pool has dropped and that lie here from then on, counted whenever that happens.
    """

    def __init__(self, core: Core, adoption: Adoption, segments: HostSegments) -> None:
        self.segments, self.num_left = segments, 0
        self._tree, self._table, self._readers, self._guard = core.tree, core.table, core.readers, core.guard
        self._spans, self._complements, self._compressor = core.table.spans, core.complements, core.compressor
        self._packer, self._config, self._adoption = core.compressor.packer, core.compressor.config, adoption
        self._min_tokens = segments.identity.min_prefix_tokens
        segments.sizes = self._sizes

    def has_room_for(self, segment: Segment) -> bool:
        """Whether a segment would be here once it was dropped, and push out nothing that the pool does not have."""
        is_found = segment.num_tokens >= self._min_tokens
        beside = self._packer.slot_bytes() + 8 * segment.end  # for the lengths of its runs, and its path's tokens
        return is_found and self.segments.has_room(self._packer.bytes_of(segment) + beside)

    # ---- out --------------------------------------------------------------------------------------------------

    def leaving(self, node: Node) -> None:
        """Copy what a leaf holds that is about to be dropped: its segment, or its uncompressed tokens.

        Of uncompressed tokens the entries that the budget keeps are copied as a segment, the others as evicted from it.
        What the path leaves in the middle of earlier segments, as a long system prompt, is one copy for all its
        branches, if it and the branch are long enough to be found.

        Not copied: what is too short; the rest of an unsplittable segment; uncompressed tokens below other
        uncompressed ones, or without learned scores.
        """
        if not self.segments.num_blocks:
            return
        with self._guard.at(Place.HOST):
            path = path_to(node)
            views = views_of(path, self._spans) if node in self._spans else []
            if len(views) > 1:
                *above, own = views
                shortest = min(own.end - own.start, own.start - above[0].start)
                if shortest >= self._min_tokens and above[-1].segment.splittable:
                    self._copy([each for each in path if self._spans[each].segment is not own.segment], above)
                    views = [own]
            self._copy(path, views)

    def _copy(self, path: Sequence[Node], views: Sequence[View]) -> None:
        """Copy views of segments that end with a path; without any, the uncompressed tokens of its last node."""
        node, end = path[-1], length_of(path)
        start = views[0].start if views else end - len(node.key)
        if end - start < self._min_tokens or not self._is_usable(path):
            return
        namespace, parts = self.segments.identity.namespace(*namespace_of(node)), parts_of(views)
        # A copy takes bandwidth, and the host may have had one since it loaded the segment.
        there = self.segments.covering(tokens_of(path), start, namespace)
        # Of two copies of a segment the one that has lost fewer parts is better.
        num_lost = sum(not part.blocks for part in parts)
        if there is not None and (not views or sum(not part.blocks for part in there.parts) <= num_lost):
            # The pool loses it now, so the host's copy is no longer spare.
            self.segments.use(there.key)
            self.num_left += 1
            return
        sources = [Source(self._packer.geometry, view) for view in views] or [self._best_of(node, start, end)]
        # Copied before anything is written: they are in slots that are released next.
        evicted = None if views else self._complements.evicted(sources[0])
        num_evicted = self.segments.num_evicted
        record = export(sources, path, self._packer, self.segments.identity, parts=parts)
        num_bytes = self.segments.put(record, namespace)
        if num_bytes:
            self.num_left += 1
            # After the segment itself: evicted entries must not take the room that it needs. The stored record has this
            # very list.
            parts += self._complements.put(evicted, start, end)
            totals = self._table.totals
            totals.moved_out_segments += 1
            totals.moved_out_bytes += num_bytes
            totals.pushed_out_segments += self.segments.num_evicted - num_evicted

    def _is_usable(self, path: Sequence[Node]) -> bool:
        """Whether a copy of what the last node of a path holds could come back."""
        span = self._spans.get(path[-1])
        if span is not None:
            return span.segment.splittable or span.end == span.segment.end
        # A stored segment continues compressed tokens; below uncompressed ones none could be placed.
        is_alone = len(path) == 1 or path[-2] in self._spans
        return is_alone and self._compressor.scores_any_range

    def _best_of(self, node: Node, start: int, end: int) -> Source:
        """The entries of a node's uncompressed tokens that the budget keeps, ranked now."""
        slots, opened = self._tree.token_slots([node]), self._table.open.get(node)
        order = None if opened is None else opened.order
        if order is None or (order.start, order.end) != (start, end):
            prompt = None if opened is None else opened.prompt
            # At once: the slots are released as soon as this returns.
            order = self._compressor.rank(slots, start, prompt or CacheObservation(), turn=0)
        tokens = TokenRange(slots, start, order.keys, self._config.num_sinks(end - start, start))
        num_slots = self._config.num_slots(end - start, start)
        return Source(self._packer.geometry, tokens).best(num_slots, self._config.bits)

    def _sizes(self, record: SegmentRecord) -> list[int]:
        """Entries, beside those of sinks, that a copy keeps in the steps in which segments shrink; []: it does not."""
        geometry, rows, num_sinks = self._packer.geometry, record.kept.rows, record.kept.num_sinks
        # What layers with windows keep is cut by position. Of 16 bits among rows of 4: the next rewrite makes it small.
        if rows.order is None or geometry.has_windows or (rows.bits == 16) != (self._config.bits == 16):
            return []
        of_slot = geometry.num_runs * ROWS_PER_SLOT[rows.bits]
        num_tokens = record.end - record.start
        slots = (self._config.num_slots(num_tokens, record.start, share) for share in self._config.shares)
        return [(count - num_sinks) * of_slot for count in slots if count > num_sinks]

    # ---- in ---------------------------------------------------------------------------------------------------

    def load(self, reader: Reader, prompt: Prompt) -> None:
        """Put into the tree the segments that continue what it has of a request's prompt."""
        if not len(self.segments) or prompt.num_tokens < self._min_tokens:
            return
        with self._guard.at(Place.HOST):
            begin = time.perf_counter()
            identity = self.segments.identity
            found = self.segments.find(prompt.tokens[: prompt.num_tokens], identity.namespace(*prompt.namespace))
            if not found:
                return
            for record in self.segments.continuing(self._adoption.lookup(prompt, identity), found, self.segments.get):
                num_tokens = self._adoption.adopt(record, prompt.namespace, prompt.tokens[record.end :])
                # What follows continues this segment, so it has no place either.
                if not num_tokens:
                    return
                self.segments.use(record.key, in_pool=True)
                reads = self._readers[reader]
                if reads.host_start is None:
                    reads.host_start = record.end - num_tokens
                begin, since = time.perf_counter(), begin
                totals = self._table.totals
                totals.moved_in_segments += 1
                totals.moved_in_tokens += num_tokens
                totals.moved_in_bytes += sum(tensor.nbytes for tensor in record.tensors.values())
                totals.moved_in_seconds += begin - since
