"""Reader observation: attention of scoring passes to a prefix, one number per (layer, KV head, token)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.compression.prompt_observation import PromptObservation
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import QueryWindow, Signal
from sgl_kvevict.prefix import EntryAttention, Segment


class ReaderObservation:
    """Squared attention of all readers' queries, summed for each token of the range ``[start, end)`` (may be empty).

    A reader may come in chunks, and be retracted and run again; each query is counted once. Segments
    before the range, whose order is predicted, can be observed too. If the range is compressed meanwhile, its sums move
    to the new segment's entries (:meth:`hand_over`).

    Args:
        reach: sums are averaged over this many tokens on each side. For questions without answers: their queries attend
            near the answer (SnapKV, arXiv 2404.14469, Sec. 4, pools for the same reason).
        segments: segments before the range to observe; their keys are in ``k_arena``.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim]; None without segments.

    Attributes:
        entry_attention: sums of the observed segments' entries.
        prompt: observation of a prompt that continues the range, whose last queries learned scores look at.
        has_failed: an error made the observation unusable.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        start: int,
        end: int,
        reach: int = 0,
        segments: Sequence[Segment] = (),
        k_arena: Tensor | None = None,
    ) -> None:
        self.k_arena = k_arena
        self.entry_attention: list[EntryAttention] = []
        self.prompt: PromptObservation | None = None
        self.geometry = geometry
        self._num_slots = 0  # of observed segments; slots, because numbers of entries differ between ranks
        for segment in segments:
            self._observe_entries(segment, segment.positions.new_zeros(segment.num_entries, dtype=torch.float32))
        self.start = start
        self.end = end
        self.reach = reach
        self.has_failed = False
        self._counted: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._squares: Tensor | None = None
        self._sm_scales = [0.0] * geometry.num_layers

    @property
    def num_bytes(self) -> int:
        """Memory once a chunk is recorded; equal on all tensor-parallel ranks."""
        return 4 * self.geometry.num_runs * (self.end - self.start + self._num_slots)

    def hand_over(self, segment: Segment) -> None:
        """Move the sums of the range's first tokens to the entries of the segment that now stores them.

        Does nothing if the segment begins elsewhere or ends after the range (sums would be missing), with a reach
        (neighbours would be missing), or if the segment has no order (it cannot shrink).
        """
        if self.reach or segment.start != self.start or segment.end > self.end or segment.order is None:
            return
        num_tokens = segment.num_tokens
        if self._squares is None:
            squares = segment.positions.new_zeros(segment.num_entries, dtype=torch.float32)
        else:
            runs = segment.run_of_entries()
            squares = self._squares.flatten(0, 1)[runs, segment.positions - segment.start]
            self._squares = self._squares[..., num_tokens:].clone()
        self._observe_entries(segment, squares)
        self.start = segment.end

    def observes(self, segment: Segment) -> bool:
        """Whether the entries of a segment are observed."""
        return any(one is segment.entry_attention for one in self.entry_attention)

    def close(self) -> None:
        """End the observation of segments: no more readers will come."""
        for one in self.entry_attention:
            one.is_open = False

    def begin_chunk(
        self,
        reader: object,
        query_start: int,
        query_end: int,
        token_slots: Tensor,
        segments: Sequence[Segment] = (),
    ) -> ReaderChunk:
        """Announce the queries ``[query_start, query_end)`` of a reader.

        Queries before ``end`` recompute the range itself and are not counted. ``reader`` is the request object, because
        clients choose request ids; ``token_slots``, [end - start], int64, are the range's; of the reader's
        ``segments``, those not observed are ignored.
        """
        counted = max(self._counted.get(reader, query_start), self.end)
        self._counted[reader] = max(counted, query_end)
        num_counted = min(max(counted - query_start, 0), query_end - query_start)
        observed = tuple(segment for segment in segments if self.observes(segment))
        return ReaderChunk(self, query_start + num_counted, num_counted, token_slots, observed)

    def add(self, layer: int, squares: Tensor, sm_scale: float) -> None:
        """Add squared attention, [num_kv_heads, end - start], float32, to one layer."""
        if self._squares is None:
            self._squares = squares.new_zeros(self.geometry.num_layers, *squares.shape)
        self._squares[layer] += squares
        self._sm_scales[layer] = sm_scale

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """The view of a part of the range in one layer; see :meth:`PromptObservation.show`."""
        first = start - self.start
        k_scale, v_scale = self.geometry.scales.of(layer)
        part = slice(first, first + token_slots.numel())
        signals: dict[Signal, object] = {}
        if self._squares is not None and not self.geometry.window(layer):
            signals[Signal.READER_ATTENTION] = self._spread(self._squares[layer], part).sqrt()
        if self.prompt is not None:
            window = self.prompt.show(layer, start, k_buffer, v_buffer, token_slots).find(
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
            sm_scale=self._sm_scales[layer],
            signals=signals,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def scores(self, num_tokens: int) -> Tensor:
        """[num_layers, num_kv_heads, num_tokens], float32: of the range's first tokens; ValueError without readers."""
        if self._squares is None:
            raise ValueError("no reader was observed")
        return self._squares[..., :num_tokens].sqrt()

    def _observe_entries(self, segment: Segment, squares: Tensor) -> None:
        segment.entry_attention = EntryAttention(squares)
        self.entry_attention.append(segment.entry_attention)
        self._num_slots += segment.num_slots

    def _spread(self, squares: Tensor, part: slice) -> Tensor:
        """Squares of a part of the range, averaged over ``reach`` tokens on each side."""
        first = max(part.start - self.reach, 0)
        near = squares[:, first : part.stop + self.reach]
        spread: Tensor = avg_pool1d(near, 2 * self.reach + 1, 1, self.reach, count_include_pad=False)
        return spread[:, part.start - first : part.stop - first]


@dataclass(frozen=True)
class ReaderChunk:
    """Queries of one reader in one forward.

    Attributes:
        query_start: logical position of the first query to count; the ``num_counted`` before it are skipped.
        token_slots: [end - start], int64, slots of the observed range.
        segments: observed segments that the reader reads.
    """

    observation: ReaderObservation
    query_start: int
    num_counted: int
    token_slots: Tensor
    segments: tuple[Segment, ...] = ()

    def fail(self) -> None:
        """Mark the observation as unusable after an error."""
        self.observation.has_failed = True

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """See :meth:`PromptObservation.record`; layers with a sliding window are skipped."""
        geometry = self.observation.geometry
        if geometry.window(layer):
            return
        queries, lse = queries[self.num_counted :].contiguous(), lse[self.num_counted :].contiguous()
        for segment in self.segments:
            assert self.observation.k_arena is not None
            _add_entry_attention(segment, layer, queries, lse, self.observation.k_arena, sm_scale)
        if not self.token_slots.numel():
            return
        squares = accumulated_attention(
            queries,
            lse,
            k_buffer,
            self.token_slots,
            sm_scale=sm_scale * geometry.scales.of(layer)[0],
            key_start=self.observation.start,
            query_start=self.query_start,
            reduction="squares",
        )
        self.observation.add(layer, squares, sm_scale)


def _add_entry_attention(
    segment: Segment, layer: int, queries: Tensor, lse: Tensor, k_arena: Tensor, sm_scale: float
) -> None:
    """Add the squared attention of queries (see :meth:`ReaderChunk.record`) to one layer's entries of a segment.

    Runs are padded to the longest; on a GPU to the number of the segment's tokens, which needs no host sync.
    """
    geometry, paid = segment.geometry, segment.entry_attention
    assert paid is not None
    if segment.num_entries == 0:
        return
    first_run = layer * geometry.num_kv_heads
    bounds = segment.indptr[first_run : first_run + geometry.num_kv_heads + 1].long()
    lens = bounds.diff()[:, None]
    width = int(lens.max()) if lens.device.type == "cpu" else segment.num_tokens
    places = torch.arange(width, device=lens.device)
    is_entry = places < lens  # [num_kv_heads, width]
    entries = torch.where(is_entry, bounds[:-1, None] + places, 0)
    rows = segment.head_slots[entries.T.flatten()]
    keys = gather_rows(k_arena.view(-1, geometry.head_dim), rows, geometry.scales.of(layer)[0]).to(queries.dtype)
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
    paid.squares.index_add_(0, entries.flatten(), squares.masked_fill_(~is_entry, 0.0).flatten())
