"""What the readers of a prefix leave behind for the policy: one number per (layer, KV head, token)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvevict_kernels.key_scores import accumulated_attention
from sgl_kvevict.compression.attention_products import AttentionProducts
from sgl_kvevict.compression.entry_attention import add_entry_attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.prefix import EntryReadings, Segment


class ReaderObservation:
    """The attention that the queries of all readers paid each token of ``[start, end)``, squared and summed.

    With a ``reach`` it is averaged over the tokens around each token: where only a question was read, its answer's own
    queries, which would point from each token of the answer to the next, are not there (SnapKV, arXiv 2404.14469,
    Sec. 4, pools for the same reason).

    Readers may come in chunks, several in one batch, and be retracted and run again: what a reader asked before is
    not counted twice.

    What comes before the range may be compressed, by scores that only expected what readers pay. Then the entries of
    these segments are observed too. And when slots are short, the range itself is compressed while it is observed: what
    was seen of it goes on with its entries (:meth:`hand_over`).

    Args:
        geometry: sizes of the model.
        start: logical position of the range's first token.
        end: logical position after its last one; the range may be empty.
        reach: how far around a token (tokens).
        segments: those before the range whose entries are observed too.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], where their keys are; None: there will be none.
        products: what a fit of the range needs to know of its readers; None: it is not fitted.

    Attributes:
        readings: what was paid to entries of segments.
        num_readers: readers seen to their end.
        has_failed: something could not be recorded; nothing may be compressed with it.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        start: int,
        end: int,
        reach: int = 0,
        segments: Sequence[Segment] = (),
        k_arena: Tensor | None = None,
        products: AttentionProducts | None = None,
    ) -> None:
        self.k_arena = k_arena
        self.products = products
        self.readings: list[EntryReadings] = []
        self._geometry = geometry
        self._num_slots = 0  # of segments whose entries are observed; how many entries they have differs by rank
        for segment in segments:
            self._observe_entries(segment, segment.positions.new_zeros(segment.num_entries, dtype=torch.float32))
        self.start = start
        self.end = end
        self.reach = reach
        self.num_readers = 0
        self.has_failed = False
        self._counted: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._squares: Tensor | None = None
        self._sm_scales = [0.0] * geometry.num_layers

    @property
    def num_bytes(self) -> int:
        """Memory that it takes once something was recorded; the same on all tensor-parallel ranks."""
        products = 0 if self.products is None else self.products.num_bytes
        return 4 * self._geometry.num_runs * (self.end - self.start + self._num_slots) + products

    def k_scale(self, layer: int) -> float:
        """What a stored 1 of a layer's keys is worth."""
        return self._geometry.scales.of(layer)[0]

    def has_window(self, layer: int) -> bool:
        """Whether what a layer keeps does not depend on what readers pay."""
        return self._geometry.window(layer) > 0

    def hand_over(self, segment: Segment) -> None:
        """The first tokens of the range were compressed: what was seen of them goes on with the segment's entries.

        Does nothing where the segment does not begin as the range does, or ends behind it: then nobody knows
        what its last entries would have been paid. Nor with a reach, which asks for the tokens around each one; nor
        where the segment's entries have no worth, because it never shrinks.
        """
        if self.reach or segment.start != self.start or segment.end > self.end or segment.worth is None:
            return
        num_tokens = segment.end - segment.start
        if self._squares is None:
            squares = segment.positions.new_zeros(segment.num_entries, dtype=torch.float32)
        else:
            runs = torch.arange(self._geometry.num_runs, device=segment.indptr.device)
            runs = torch.repeat_interleave(runs, segment.indptr.diff(), output_size=segment.num_entries)
            squares = self._squares.flatten(0, 1)[runs, segment.positions - segment.start]
            self._squares = self._squares[..., num_tokens:].clone()
        self._observe_entries(segment, squares)
        self.start = segment.end
        self.products = None  # what it evicted cannot be fitted to any more

    def observes(self, segment: Segment) -> bool:
        """Whether the entries of a segment are observed."""
        return any(readings is segment.readings for readings in self.readings)

    def close(self) -> None:
        """No more readers will come."""
        for readings in self.readings:
            readings.is_open = False

    def begin_chunk(
        self,
        reader: object,
        query_start: int,
        query_end: int,
        token_slots: Tensor,
        segments: Sequence[Segment] = (),
    ) -> ReaderChunk:
        """Announce queries of a reader, for every layer.

        Args:
            reader: the request itself; names are for clients to choose.
            query_start: logical position of the chunk's first token. Before ``end`` it is no reader's question, but the
                range itself, which is computed again because it is not cached any more; that does not count.
            query_end: logical position after its last one.
            token_slots: [end - start], int64, slots of the range.
            segments: those that the reader reads; those that are observed among them count.
        """
        counted = max(self._counted.get(reader, query_start), self.end)
        self._counted[reader] = max(counted, query_end)
        num_counted = min(max(counted - query_start, 0), query_end - query_start)
        observed = tuple(segment for segment in segments if self.observes(segment))
        return ReaderChunk(self, query_start + num_counted, num_counted, token_slots, observed)

    def end_reader(self, reader: object) -> None:
        """A reader was seen to its end."""
        self._counted.pop(reader, None)
        self.num_readers += 1

    def add(self, layer: int, squares: Tensor, sm_scale: float) -> None:
        """Add to one layer.

        Args:
            layer: layer index.
            squares: [num_kv_heads, end - start], float32.
            sm_scale: softmax scale of the layer.
        """
        if self._squares is None:
            self._squares = squares.new_zeros(self._geometry.num_layers, *squares.shape)
        self._squares[layer] += squares
        self._sm_scales[layer] = sm_scale

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """Return what a policy sees of a part of the range in one layer; see :meth:`PromptObservation.show`."""
        first = start - self.start
        k_scale, v_scale = self._geometry.scales.of(layer)
        part = slice(first, first + token_slots.numel())
        paid = None if self._squares is None else self._spread(self._squares[layer], part).sqrt()
        return LayerView(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=self._sm_scales[layer],
            signals={} if paid is None else {Signal.READER_ATTENTION: paid},
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def scores(self, num_tokens: int) -> Tensor:
        """[num_layers, num_kv_heads, num_tokens], float32, what readers paid each of the first tokens of the range.

        Raises:
            ValueError: nobody read it.
        """
        if self._squares is None:
            raise ValueError("no reader was observed")
        return self._squares[..., :num_tokens].sqrt()

    def _observe_entries(self, segment: Segment, squares: Tensor) -> None:
        segment.readings = EntryReadings(squares)
        self.readings.append(segment.readings)
        self._num_slots += segment.num_slots

    def _spread(self, squares: Tensor, part: slice) -> Tensor:
        """Average around the tokens of a part of the range."""
        first = max(part.start - self.reach, 0)
        near = squares[:, first : part.stop + self.reach]
        spread: Tensor = avg_pool1d(near, 2 * self.reach + 1, 1, self.reach, count_include_pad=False)
        return spread[:, part.start - first : part.stop - first]


@dataclass(frozen=True)
class ReaderChunk:
    """Queries of one reader in one forward.

    Attributes:
        observation: what they are added to.
        query_start: logical position of the first query that counts.
        num_counted: queries before it, counted when the reader ran before.
        token_slots: [end - start], int64, slots of the observed range.
        segments: whose entries are observed.
    """

    observation: ReaderObservation
    query_start: int
    num_counted: int
    token_slots: Tensor
    segments: tuple[Segment, ...] = ()

    def fail(self) -> None:
        """Something could not be recorded: the observation is of no use."""
        self.observation.has_failed = True

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Collect from one layer, unless it has a window.

        Args:
            layer: layer index.
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE.
            lse: [num_tokens, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
            k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys.
            sm_scale: softmax scale of the layer.
        """
        if self.observation.has_window(layer):
            return
        queries, lse = queries[self.num_counted :].contiguous(), lse[self.num_counted :].contiguous()
        for segment in self.segments:
            assert self.observation.k_arena is not None
            add_entry_attention(segment, layer, queries, lse, self.observation.k_arena, sm_scale)
        if not self.token_slots.numel():
            return
        squares = accumulated_attention(
            queries,
            lse,
            k_buffer,
            self.token_slots,
            sm_scale=sm_scale * self.observation.k_scale(layer),
            key_start=self.observation.start,
            query_start=self.query_start,
            reduction="squares",
        )
        self.observation.add(layer, squares, sm_scale)
        products = self.observation.products
        if products is not None:
            products.add(layer, queries, lse, k_buffer, self.token_slots, sm_scale)
