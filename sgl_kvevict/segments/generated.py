"""What is kept of the tokens that a request generates: one segment, written anew with every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.transfer import to_device
from sgl_kvevict.policies.generated import GeneratedChoice, choose_generated
from sgl_kvevict.policies.layer_view import LayerView, Show
from sgl_kvevict.policies.parts import Merger, PolicyState
from sgl_kvevict.policies.signals import QueryWindow, Signal
from sgl_kvevict.ragged import MergePlan, Selection
from sgl_kvevict.segments.query_lanes import QueryLanes
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Segment

COUNTED_AT_ONCE = 32
"""Queries whose attention is summed in one call, for policies that sum over all queries."""
_IN_FLIGHT = 2
"""Steps that may be in flight when :meth:`GeneratedCompressor.is_full` is checked."""


class Generated:
    """State of one request's generated tokens.

    Attributes:
        start: logical position of the first token that competes: the prompt's end, or later.
        end: logical position after the last recorded query.
        segment: entries kept of ``[start, segment.end)``; None before the first block.
        lens: per layer, entries of each head in the segment.
        sums: per layer, [num_kv_heads, lens + tokens], float32, attention summed over queries, of the segment's
            entries, then of the tokens after it; [] before the first count.
        lane: see :class:`QueryLanes`; None: queries are not recorded.
        num_pending: queries in the lane that are not in ``sums``.
        tried: logical position up to which compression was last tried.
    """

    def __init__(self, start: int, num_layers: int) -> None:
        self.lane: int | None = None
        self.tried = start
        self._num_layers = num_layers
        self.begin(start)

    def begin(self, start: int) -> None:
        """Reset: only tokens from this logical position on compete."""
        self.start = self.end = start
        self.segment: Segment | None = None
        self.lens = [0] * self._num_layers
        self.sums: list[Tensor] = []
        self.num_pending = 0

    def leave_segment(self) -> None:
        """Keep the segment unchanged, because other requests read it; only tokens after it compete."""
        self.start = self.compressed_end
        self.sums = [kept[:, length:] for kept, length in zip(self.sums, self.lens, strict=False)]
        self.segment, self.lens = None, [0] * self._num_layers

    @property
    def compressed_end(self) -> int:
        """Logical position up to which tokens are compressed."""
        return self.start if self.segment is None else self.segment.end

    @property
    def num_bytes(self) -> int:
        """Memory of the sums."""
        return sum(kept.nbytes for kept in self.sums)


@dataclass(frozen=True)
class GeneratedStep:
    """Recording of one decode step.

    ``places`` is [n], int64, see :meth:`QueryLanes.places`; ``rows`` [n], int64, the requests' rows of the batch, None
    for all in order.
    """

    lanes: QueryLanes
    places: Tensor
    rows: Tensor | None

    def record(self, layer: int, queries: Tensor, lse: Tensor, sm_scale: float) -> None:
        """Store the queries of one layer; see :meth:`QueryLanes.record`."""
        if self.rows is not None:
            queries, lse = queries.index_select(0, self.rows), lse.index_select(0, self.rows)
        self.lanes.record(layer, self.places, queries, lse, sm_scale)


@dataclass(frozen=True)
class GeneratedBlock:
    """What is kept of a segment of generated tokens and of those after it.

    ``selection`` and ``merge`` number the entries of both together; ``state`` is the policy's for the next block.
    """

    choice: GeneratedChoice
    selection: Selection
    merge: MergePlan | None
    state: PolicyState | None


class GeneratedCompressor:
    """Compresses generated tokens with the policy and the budget of a compressor.

    The policy can do that: :func:`~sgl_kvevict.policies.generated.generated_reasons` gives no reason against it.

    ``lanes`` is None for policies without query signals.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._policy = compressor.policy
        self._packer = compressor.packer
        self._geometry = compressor.packer.geometry
        self._config = compressor.config
        self._sums_up = Signal.ACCUMULATED_ATTENTION in self._policy.needs
        looks_back = Signal.WINDOW_QUERIES in self._policy.needs
        depth = max(COUNTED_AT_ONCE if self._sums_up else 0, self._policy.window_size if looks_back else 0)
        self.lanes: QueryLanes | None = None
        if depth:
            size = max(self._packer.k_arena.element_size(), 2)
            self.lanes = QueryLanes(self._geometry, depth, self._config.observation_bytes, size)

    def new(self, start: int) -> Generated:
        """State of a request that begins to generate at a logical position."""
        return Generated(start, self._geometry.num_layers)

    def step(self, followed: Sequence[tuple[int, int, Generated]], num_rows: int) -> GeneratedStep | None:
        """Prepare the recording of a forward with ``num_rows`` queries; None if nothing is recorded.

        ``followed`` has, per request, its row of the batch's queries, the query's logical position, and its state.
        """
        if self.lanes is None:
            return None
        rows, lanes, positions = [], [], []
        for row, position, generated in followed:
            if generated.lane is None:
                generated.lane = self.lanes.take()
            if generated.lane is None:
                continue
            if position != generated.end:  # queries are missing: earlier tokens cannot be scored
                generated.begin(position)
            generated.end = position + 1
            generated.num_pending = min(generated.num_pending + 1, self.lanes.depth)
            rows.append(row)
            lanes.append(generated.lane)
            positions.append(position)
        if not rows:
            return None
        device = self._packer.k_arena.device
        chosen = None if len(rows) == num_rows else to_device(torch.tensor(rows), device)
        return GeneratedStep(self.lanes, self.lanes.places(lanes, positions, device), chosen)

    def is_full(self, generated: Generated) -> bool:
        """Whether :meth:`count` must be called before another step begins."""
        return self._sums_up and self.lanes is not None and generated.num_pending >= self.lanes.depth - _IN_FLIGHT

    def is_followed(self, generated: Generated) -> bool:
        """Whether the signals that the policy needs were recorded."""
        return self.lanes is None or (generated.lane is not None and generated.num_pending + len(generated.sums) > 0)

    def give_up(self, generated: Generated) -> None:
        """Release the request's lane."""
        if self.lanes is not None and generated.lane is not None:
            self.lanes.give_back(generated.lane)
            generated.lane = None

    def num_slots(self, generated: Generated, end: int) -> int:
        """Token slots of the segment after compression up to the logical position ``end``."""
        held = 0 if generated.segment is None else generated.segment.num_slots
        wanted = self._config.num_slots(end - generated.start, generated.start)
        return min(wanted, held + end - generated.compressed_end)

    def count(self, generated: Generated, token_slots: Tensor) -> None:
        """Add the recorded queries' attention to ``sums``.

        ``token_slots`` is [n], int64, slots of the tokens from the segment's end to the last query's.
        """
        if not (self._sums_up and generated.num_pending):
            return
        places = self._places(generated, generated.num_pending)
        first = generated.end - generated.num_pending - generated.compressed_end
        assert self.lanes is not None
        sums = []
        for layer in range(self._geometry.num_layers):
            table = self._table(generated, layer, token_slots)
            queries, lse, sm_scale = self.lanes.rows(layer, places)
            keys = self._packer.keys(table.T)
            paid = accumulated_attention(
                queries,
                lse,
                keys,
                torch.arange(table.shape[1], device=keys.device),
                sm_scale=sm_scale * self._geometry.scales.of(layer)[0],
                key_start=0,
                query_start=generated.lens[layer] + first,
            )
            if generated.sums:
                paid[:, : generated.sums[layer].shape[1]] += generated.sums[layer]
            sums.append(paid)
        generated.sums, generated.num_pending = sums, 0

    def choose(self, generated: Generated, token_slots: Tensor, num_new: int, parent: Segment | None) -> GeneratedBlock:
        """Choose what is kept of the segment and of the next tokens, which compete for the budget.

        ``token_slots``, [n], int64, are those of the tokens from the segment's end to the last query's, or to the last
        of the ``num_new`` tokens; ``parent``, the segment before on the path, gives the first block's policy state.
        Once it is written, :meth:`written` must be called.
        """
        self.count(generated, token_slots)
        old, end = generated.segment, generated.compressed_end + num_new
        new_slots, num_slots = token_slots[:num_new], self.num_slots(generated, end)
        held = 0 if old is None else old.num_slots
        before = parent if old is None else old
        state = None if before is None else before.policy_state
        assert state is None or isinstance(state, PolicyState)
        tables = [self._table(generated, layer, new_slots) for layer in range(self._geometry.num_layers)]
        keeps_all = num_slots == held + num_new
        if keeps_all:
            lens = [table.shape[1] for table in tables]
            choice = GeneratedChoice(lens, [torch.ones_like(table, dtype=torch.bool) for table in tables])
        else:
            num_sinks = max(self._config.sink_tokens, self._policy.num_sink_tokens) - generated.start
            show = self._show(generated, tables, self._policy.scorer.needs)
            choice = choose_generated(self._policy, show, generated.lens, num_new, num_slots, max(num_sinks, 0))
        merge = None
        if self._policy.merger is not None and not keeps_all:
            merge, state = self._merge(self._policy.merger, generated, tables, choice, state)
        return GeneratedBlock(choice, self._selection(choice), merge, state)

    def written(self, generated: Generated, block: GeneratedBlock, segment: Segment) -> None:
        """The kept entries of a block were written into ``segment``: number the sums as its entries."""
        for layer, kept in enumerate(block.choice.kept if generated.sums else ()):
            sums, num = generated.sums[layer], kept.shape[1]
            stays = sums[:, :num].flatten()[self._flat(kept, block.choice.lens[layer])]
            generated.sums[layer] = torch.cat([stays.view(kept.shape[0], -1), sums[:, num:]], dim=1)
        generated.segment, generated.lens = segment, block.choice.lens

    def _selection(self, choice: GeneratedChoice) -> Selection:
        """The chosen candidates."""
        heads = self._geometry.num_kv_heads
        layers = zip(choice.kept, choice.lens, strict=True)
        indices = [(self._flat(kept, length) % kept.shape[1]).int() for kept, length in layers]
        keep_lens = torch.tensor(choice.lens, dtype=torch.int32)[:, None].expand(-1, heads).contiguous()
        keep_lens = to_device(keep_lens, self._packer.k_arena.device)
        return Selection(keep_lens, torch.cat(indices), heads * sum(choice.lens))

    def _merge(
        self,
        merger: Merger,
        generated: Generated,
        tables: Sequence[Tensor],
        choice: GeneratedChoice,
        state: PolicyState | None,
    ) -> tuple[MergePlan, PolicyState]:
        """The merges of candidates that are not chosen into chosen ones, and the policy's next state."""
        show = self._show(generated, tables, merger.needs)
        plans, thresholds = [], []
        for layer, kept in enumerate(choice.kept):
            own = None if state is None else PolicyState(state.threshold[layer : layer + 1])
            plan, after = merger.merge([show(layer)], kept[None], own)
            plans.append(replace(plan, layers=plan.layers + layer))
            thresholds.append(after.threshold)
        sizes = torch.cat([plan.indptr.diff() for plan in plans])
        indptr = pad(sizes.cumsum(0), (1, 0)).int()
        names = ("layers", "heads", "indices", "weights")
        sources = {name: torch.cat([getattr(plan, name) for plan in plans]) for name in names}
        return MergePlan(indptr, **sources), PolicyState(torch.cat(thresholds))

    def _flat(self, kept: Tensor, length: int) -> Tensor:
        """[num_kv_heads * length], int64: flat indices of the set elements of a layer's mask."""
        return torch.nonzero_static(kept.flatten(), size=self._geometry.num_kv_heads * length).squeeze(-1)

    def _show(self, generated: Generated, tables: Sequence[Tensor], needs: frozenset[Signal]) -> Show:
        """Layer views of the candidates, as a range that starts at 0."""
        places = None
        if Signal.WINDOW_QUERIES in needs:  # of uncompressed tokens only
            count = min(generated.num_pending, self._policy.window_size, generated.end - generated.compressed_end)
            places = self._places(generated, count)

        def show(layer: int) -> LayerView:
            table = tables[layer]
            num = table.shape[1]
            nothing = self._packer.k_arena.new_empty(0, self._geometry.num_kv_heads, self._geometry.head_dim)
            signals: dict[Signal, object] = {}
            sm_scale = 1.0
            if places is not None and self.lanes is not None:
                queries, lse, sm_scale = self.lanes.rows(layer, places)
                start = generated.lens[layer] + generated.end - places.numel() - generated.compressed_end
                signals[Signal.WINDOW_QUERIES] = QueryWindow(queries, lse, start)
            if generated.sums:
                signals[Signal.ACCUMULATED_ATTENTION] = generated.sums[layer][:, :num]
            k_scale, v_scale = self._geometry.scales.of(layer)
            return LayerView(
                layer=layer,
                start=0,
                k_buffer=self._packer.keys(table.T) if Signal.KEYS in needs else nothing,
                v_buffer=self._packer.values(table.T) if Signal.VALUES in needs else nothing,
                token_slots=torch.arange(num, device=table.device),
                sm_scale=sm_scale,
                signals=signals,
                k_scale=k_scale,
                v_scale=v_scale,
            )

        return show

    def _places(self, generated: Generated, count: int) -> Tensor:
        assert self.lanes is not None and generated.lane is not None
        positions = list(range(generated.end - count, generated.end))
        return self.lanes.places([generated.lane] * count, positions, self._packer.k_arena.device)

    def _table(self, generated: Generated, layer: int, token_slots: Tensor) -> Tensor:
        """[num_kv_heads, lens + n], int32: head slots of a layer's segment entries, then of the tokens."""
        tokens = self._packer.head_slots(layer, token_slots)
        if generated.segment is None:
            return tokens
        heads = self._geometry.num_kv_heads
        first = heads * sum(generated.lens[:layer])
        (part,) = generated.segment.storage.parts
        old = part.rows[first : first + heads * generated.lens[layer]]
        return torch.cat([old.view(heads, -1), tokens], dim=1)
