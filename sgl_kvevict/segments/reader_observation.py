"""Attention of scoring passes to a prefix: squares, summed for each entry of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.row_codec import RowStatistics, load_rows
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import QueryWindow, Signal
from sgl_kvevict.segments.prompt_observation import Observation
from sgl_kvevict.segments.segment import Segment


class ReaderObservation:
    """Sums up the attention that the passes over one prefix pay to its entries, and remembers the queries counted.

    The sums lie with the entries of the observed segments (:attr:`Segment.attention`), in place or packed, so a resize
    takes them along. A reader may come in chunks, and be retracted and run again; each query is counted once.

    Args:
        geometry: of the arena.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim].
        end: logical length of the prefix; queries before it compute it again, and are not counted.
        radius: sums are averaged over this many tokens on each side. For questions without answers: their queries
            attend near the answer (SnapKV, arXiv 2404.14469, Sec. 4, pools for the same reason).
        prompt: observation of a prompt that continues the prefix, whose last queries learned scores look at.
        statistics: by which rows of 8 and 4 bits are read; None: there are none.

    Attributes:
        num_bytes: memory of the sums; equal on all tensor-parallel ranks.
        is_complete: all passes were read.
        has_failed: an error made the sums unusable.
        has_changed: an observed segment is gone, or was resized without its sums.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        k_arena: Tensor,
        end: int,
        radius: int = 0,
        prompt: Observation | None = None,
        statistics: RowStatistics | None = None,
    ) -> None:
        self.geometry = geometry
        self.k_arena = k_arena
        self.end = end
        self.radius = radius
        self.prompt = prompt
        self.statistics = statistics
        self.num_bytes = 0
        self.is_complete = False
        self.has_failed = False
        self.has_changed = False
        self.sm_scales = [0.0] * geometry.num_layers
        self._counted: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def observe(self, segment: Segment) -> None:
        """Begin to observe a segment's entries."""
        self.num_bytes += bytes_of(segment, self.statistics)
        shape: tuple[int, ...] = (segment.num_entries,)
        if segment.packed is None:
            shape = (self.geometry.num_layers, self.geometry.num_kv_heads, segment.num_tokens)
        segment.attention, segment.readers = torch.zeros(shape, device=self.k_arena.device), self

    def begin_chunk(
        self, reader: object, query_start: int, query_end: int, parts: Sequence[tuple[Segment, Tensor | None]]
    ) -> ReaderChunk:
        """Announce the queries ``[query_start, query_end)`` of a reader.

        ``reader`` is the request object, because clients choose request ids; ``parts`` are the observed segments that
        it reads, with the slots ([num_tokens], int64) of those in place.
        """
        counted = max(self._counted.get(reader, query_start), self.end)
        self._counted[reader] = max(counted, query_end)
        num_counted = min(max(counted - query_start, 0), query_end - query_start)
        return ReaderChunk(self, query_start + num_counted, num_counted, tuple(parts))


def bytes_of(segment: Segment, statistics: RowStatistics | None) -> int:
    """Bytes that the sums of a segment take at most; ``statistics``: see :class:`ReaderObservation`.

    They follow from its slots, because tensor-parallel ranks have different numbers of entries of each width.
    """
    geometry = segment.geometry
    is_whole = segment.packed is None or statistics is None
    return 4 * geometry.num_runs * segment.num_slots * geometry.rows_per_slot(16 if is_whole else 4)


@dataclass(frozen=True)
class MeasuredRange:
    """Signals of a range in place that passes have read.

    ``attention``, [num_layers, num_kv_heads, num_tokens], float32, are its sums; ``readers`` added them up.
    """

    readers: ReaderObservation
    attention: Tensor
    num_bytes = 0

    @property
    def is_asked(self) -> bool:
        """Whether the passes asked a request's questions: then learned scores do not count."""
        return self.readers.radius > 0

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """See :meth:`PromptObservation.show`; the whole range."""
        readers = self.readers
        k_scale, v_scale = readers.geometry.scales.of(layer)
        signals: dict[Signal, object] = {}
        if not readers.geometry.window(layer):
            signals[Signal.READER_ATTENTION] = self._spread(self.attention[layer]).sqrt()
        if readers.prompt is not None:
            window = readers.prompt.show(layer, start, k_buffer, v_buffer, token_slots).find(
                Signal.WINDOW_QUERIES, QueryWindow
            )
            if window is not None:
                signals[Signal.WINDOW_QUERIES] = window
        return LayerView(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=readers.sm_scales[layer],
            signals=signals,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _spread(self, squares: Tensor) -> Tensor:
        """Squares, averaged over ``radius`` tokens on each side."""
        radius = self.readers.radius
        spread: Tensor = avg_pool1d(squares, 2 * radius + 1, 1, radius, count_include_pad=False)
        return spread


@dataclass(frozen=True)
class ReaderChunk:
    """Queries of one reader in one forward.

    Attributes:
        query_start: logical position of the first query to count; the ``num_counted`` before it are skipped.
        parts: observed segments that the reader reads, see :meth:`ReaderObservation.begin_chunk`.
    """

    observation: ReaderObservation
    query_start: int
    num_counted: int
    parts: tuple[tuple[Segment, Tensor | None], ...]

    def fail(self) -> None:
        """Mark the observation as unusable after an error."""
        self.observation.has_failed = True

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """See :meth:`PromptObservation.record`; layers with a sliding window are skipped."""
        geometry = self.observation.geometry
        if geometry.window(layer):
            return
        self.observation.sm_scales[layer] = sm_scale
        queries, lse = queries[self.num_counted :].contiguous(), lse[self.num_counted :].contiguous()
        for segment, token_slots in self.parts:
            if token_slots is None:
                _add_entry_attention(self.observation, segment, layer, queries, lse, sm_scale)
                continue
            assert segment.attention is not None
            segment.attention[layer] += accumulated_attention(
                queries,
                lse,
                k_buffer,
                token_slots,
                sm_scale=sm_scale * geometry.scales.of(layer)[0],
                key_start=segment.start,
                query_start=self.query_start,
                reduction="squares",
            )


def _add_entry_attention(
    readers: ReaderObservation, segment: Segment, layer: int, queries: Tensor, lse: Tensor, sm_scale: float
) -> None:
    """Add the squared attention of queries (see :meth:`ReaderChunk.record`) to one layer's entries of a segment.

    Runs are padded to the longest; on a GPU to the number of the segment's tokens, which needs no host sync.
    """
    geometry, attention, first = segment.geometry, segment.attention, 0
    assert attention is not None
    first_run = layer * geometry.num_kv_heads
    for part in segment.storage.parts:
        own = attention[first : first + part.num_entries]
        first += part.num_entries
        if not part.num_entries:
            continue
        bounds = part.indptr[first_run : first_run + geometry.num_kv_heads + 1].long()
        lens = bounds.diff()[:, None]
        width = int(lens.max()) if lens.device.type == "cpu" else segment.num_tokens
        places = torch.arange(width, device=lens.device)
        is_entry = places < lens  # [num_kv_heads, width]
        entries = torch.where(is_entry, bounds[:-1, None] + places, 0)
        rows = part.rows[entries.T.flatten()]
        if part.bits == 16:
            keys = gather_rows(readers.k_arena.view(-1, geometry.head_dim), rows, geometry.scales.of(layer)[0])
        else:
            assert readers.statistics is not None
            runs = (first_run + torch.arange(geometry.num_kv_heads, device=lens.device)).repeat(width)
            keys = load_rows(readers.k_arena, rows, part.bits, readers.statistics.of_runs(runs)[0])
        keys = keys.to(queries.dtype)
        squares = accumulated_attention(
            queries,
            lse,
            keys.view(width, geometry.num_kv_heads, geometry.head_dim),
            places,
            sm_scale=sm_scale,
            key_start=0,
            query_start=width,
            reduction="squares",
        )
        own.index_add_(0, entries.flatten(), squares.masked_fill_(~is_entry, 0.0).flatten())
