"""What a request generates, compressed while it generates: one segment that is written anew with every block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.transfer import to_device
from sgl_kvevict.compression.compressor import Compression, Compressor
from sgl_kvevict.compression.query_lanes import QueryLanes
from sgl_kvevict.guard import accounting
from sgl_kvevict.policies.layer_view import LayerView, Show
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.policies.signals import QueryWindow, Signal
from sgl_kvevict.policies.suffix import SuffixChoice, choose_suffix
from sgl_kvevict.prefix import Segment

COUNTED_AT_ONCE = 32
"""Queries whose attention is added up in one go, where a policy sums over all of them."""
_IN_FLIGHT = 2
"""Steps that may be under way when it is decided whether a lane is full."""


class Suffix:
    """What one request generates.

    Attributes:
        start: logical position from which on tokens compete: the prompt's end, or a later one.
        end: logical position after the last query that was recorded.
        segment: what was kept of ``[start, segment.end)``; None before the first block.
        lens: per layer, entries that each head has in the segment.
        sums: per layer, [num_kv_heads, lens + tokens], float32, attention that the recorded queries paid to the
            segment's entries and to the tokens behind it; [] before the first are counted.
        lane: where the last queries are; None: they are not recorded.
        num_pending: of them, those that are not in ``sums``.
        tried: logical position up to which it was last tried to compress.
    """

    def __init__(self, start: int, num_layers: int) -> None:
        self.lane: int | None = None
        self.tried = start
        self._num_layers = num_layers
        self.begin(start)

    def begin(self, start: int) -> None:
        """Tokens compete from a position on; what was known is of no use."""
        self.start = self.end = start
        self.segment: Segment | None = None
        self.lens = [0] * self._num_layers
        self.sums: list[Tensor] = []
        self.num_pending = 0

    def leave_segment(self) -> None:
        """What was kept is read by others too, and stays as it is: only tokens behind it compete from now on."""
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


class SuffixStep:
    """One decode step of requests that are followed.

    Args:
        lanes: where their queries go.
        places: [n], int64.
        rows: [n], int64, the requests' rows of the batch; None: all, in order.
    """

    def __init__(self, lanes: QueryLanes, places: Tensor, rows: Tensor | None) -> None:
        self._lanes = lanes
        self._places = places
        self._rows = rows

    def record(self, layer: int, queries: Tensor, lse: Tensor, sm_scale: float) -> None:
        """Keep the queries of one layer; see :meth:`QueryLanes.record`."""
        if self._rows is not None:
            queries, lse = queries.index_select(0, self._rows), lse.index_select(0, self._rows)
        self._lanes.record(layer, self._places, queries, lse, sm_scale)


@dataclass(frozen=True)
class _Entries:
    """Entries that stay.

    Attributes:
        sources: [num_sources], int32, head slots.
        positions: [num_entries], int32, logical.
        lens: [num_layers, num_kv_heads], int32.
        merge: ``indptr`` and ``weights`` over the sources; None: each entry is one of them.
    """

    sources: Tensor
    positions: Tensor
    lens: Tensor
    merge: tuple[Tensor, Tensor] | None


class SuffixCompressor:
    """Compresses suffixes with a compressor's policy and budget.

    Args:
        compressor: of prompts; its policy has a rule for suffixes (``suffix_reasons``).

    Attributes:
        lanes: last queries of requests; None for policies that look at none.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._policy = compressor.policy
        self._store = compressor.store
        self._geometry = compressor.store.geometry
        self._config = compressor.config
        self._sums_up = Signal.ACCUMULATED_ATTENTION in self._policy.needs
        looks_back = Signal.WINDOW_QUERIES in self._policy.needs
        depth = max(COUNTED_AT_ONCE if self._sums_up else 0, self._policy.window_size if looks_back else 0)
        self.lanes: QueryLanes | None = None
        if depth:
            size = max(self._store.k_arena.element_size(), 2)
            self.lanes = QueryLanes(self._geometry, depth, self._config.observation_bytes, size)

    def new(self, start: int) -> Suffix:
        """A request begins to generate at a logical position."""
        return Suffix(start, self._geometry.num_layers)

    def step(self, followed: Sequence[tuple[int, int, Suffix]], num_rows: int) -> SuffixStep | None:
        """Follow a forward in which requests generate.

        Args:
            followed: for each request its row of the batch's queries, the query's logical position, and its suffix.
            num_rows: of the batch's queries.

        Returns:
            None: nothing is to be recorded.
        """
        if self.lanes is None:
            return None
        rows, lanes, positions = [], [], []
        for row, position, suffix in followed:
            if suffix.lane is None:
                suffix.lane = self.lanes.take()
            if suffix.lane is None:
                continue
            if position != suffix.end:  # it was not followed for a while: what it had by then is not scored any more
                suffix.begin(position)
            suffix.end = position + 1
            suffix.num_pending = min(suffix.num_pending + 1, self.lanes.depth)
            rows.append(row)
            lanes.append(suffix.lane)
            positions.append(position)
        if not rows:
            return None
        device = self._store.k_arena.device
        chosen = None if len(rows) == num_rows else to_device(torch.tensor(rows), device)
        return SuffixStep(self.lanes, self.lanes.places(lanes, positions, device), chosen)

    def is_full(self, suffix: Suffix) -> bool:
        """Whether the recorded queries must be counted before another step begins."""
        return self._sums_up and self.lanes is not None and suffix.num_pending >= self.lanes.depth - _IN_FLIGHT

    def is_followed(self, suffix: Suffix) -> bool:
        """Whether there is what the policy scores by."""
        return self.lanes is None or (suffix.lane is not None and suffix.num_pending + len(suffix.sums) > 0)

    def give_up(self, suffix: Suffix) -> None:
        """A request ended."""
        if self.lanes is not None and suffix.lane is not None:
            self.lanes.give_back(suffix.lane)
            suffix.lane = None

    def num_slots(self, suffix: Suffix, end: int) -> int:
        """Token slots that a suffix takes when it is compressed up to a position."""
        held = 0 if suffix.segment is None else suffix.segment.num_slots
        wanted = self._config.num_slots(end - suffix.start, suffix.start)
        return min(wanted, held + end - suffix.compressed_end)

    def count(self, suffix: Suffix, token_slots: Tensor) -> None:
        """Add up what the recorded queries pay to each entry and token.

        Args:
            suffix: whose queries.
            token_slots: [n], int64, slots of the tokens from the segment's end to the last query's.
        """
        if not (self._sums_up and suffix.num_pending):
            return
        places = self._places(suffix, suffix.num_pending)
        first = suffix.end - suffix.num_pending - suffix.compressed_end
        assert self.lanes is not None
        sums = []
        for layer in range(self._geometry.num_layers):
            table = self._table(suffix, layer, token_slots)
            queries, lse, sm_scale = self.lanes.rows(layer, places)
            keys = self._store.keys(table.T)
            paid = accumulated_attention(
                queries,
                lse,
                keys,
                torch.arange(table.shape[1], device=keys.device),
                sm_scale=sm_scale * self._geometry.scales.of(layer)[0],
                key_start=0,
                query_start=suffix.lens[layer] + first,
            )
            if suffix.sums:
                paid[:, : suffix.sums[layer].shape[1]] += suffix.sums[layer]
            sums.append(paid)
        suffix.sums, suffix.num_pending = sums, 0

    def compress(self, suffix: Suffix, token_slots: Tensor, num_new: int, parent: Segment | None) -> Compression:
        """Write a suffix's segment anew: what it kept, and the next tokens, compete for its budget.

        Args:
            suffix: to compress; afterwards it has the new segment.
            token_slots: [n], int64, slots of the tokens from the segment's end to the last query's, or to the last
                token that is compressed.
            num_new: of them, those that are compressed.
            parent: segment of the path before it; its policy state carries on at the first block.

        Returns:
            What was done; freed are slots of the old segment or of the tokens.
        """
        begin = time.perf_counter()
        self.count(suffix, token_slots)
        old, end = suffix.segment, suffix.compressed_end + num_new
        new_slots, num_slots = token_slots[:num_new], self.num_slots(suffix, end)
        held = 0 if old is None else old.num_slots
        before = parent if old is None else old
        state = None if before is None else before.policy_state
        assert state is None or isinstance(state, PolicyState)
        tables = [self._table(suffix, layer, new_slots) for layer in range(self._geometry.num_layers)]
        keeps_all = num_slots == held + num_new
        if keeps_all:
            lens = [table.shape[1] for table in tables]
            choice = SuffixChoice(lens, [torch.ones_like(table, dtype=torch.bool) for table in tables])
        else:
            choice = self._choose(suffix, tables, num_new, num_slots)
        entries, state = self._entries(suffix, tables, choice, num_new, state, merges=not keeps_all)
        with accounting():
            slots = new_slots if old is None else torch.cat([old.token_slots, new_slots])
            bounds = (suffix.start, end)
            segment, freed = self._store.write(
                slots, entries.sources, entries.lens, entries.positions, bounds, entries.merge
            )
            segment.policy_state, segment.is_generated = state, True
            self._carry_on(suffix, choice, segment)
        merged = entries.sources.numel() - segment.num_entries
        num_tokens, seconds = segment.end - segment.start, time.perf_counter() - begin
        done = Compression(segment, freed, segment.start, num_tokens, merged, seconds, replaced=old)
        self._compressor.stats.count(done)
        return done

    def _choose(self, suffix: Suffix, tables: Sequence[Tensor], num_new: int, num_slots: int) -> SuffixChoice:
        num_sinks = max(self._config.sink_tokens, self._policy.num_sink_tokens) - suffix.start
        show = self._show(suffix, tables, self._policy.scorer.needs)
        return choose_suffix(self._policy, show, suffix.lens, num_new, num_slots, max(num_sinks, 0))

    def _entries(
        self,
        suffix: Suffix,
        tables: Sequence[Tensor],
        choice: SuffixChoice,
        num_new: int,
        state: PolicyState | None,
        *,
        merges: bool,
    ) -> tuple[_Entries, PolicyState | None]:
        """Where the entries are that stay, what they become, and the policy's state after that."""
        sources, positions, sizes, weights, thresholds = [], [], [], [], []
        merger = self._policy.merger if merges else None
        show = self._show(suffix, tables, frozenset() if merger is None else merger.needs)
        for layer, (table, kept) in enumerate(zip(tables, choice.kept, strict=True)):
            index = self._flat(kept, choice.lens[layer])
            positions.append(self._positions(suffix, layer, num_new).flatten()[index])
            if merger is None:
                sources.append(table.flatten()[index])
                continue
            own = None if state is None else PolicyState(state.threshold[layer : layer + 1])
            plan, after = merger.merge([show(layer)], kept[None], own)
            sources.append(table[plan.heads.long(), plan.indices.long()])
            sizes.append(plan.indptr.diff())
            weights.append(plan.weights)
            thresholds.append(after.threshold)
        merge = None
        if thresholds:
            merge = pad(torch.cat(sizes).cumsum(0), (1, 0)).int(), torch.cat(weights)
            state = PolicyState(torch.cat(thresholds))
        lens = torch.tensor(choice.lens, dtype=torch.int32)[:, None].expand(-1, self._geometry.num_kv_heads)
        device = self._store.k_arena.device
        return _Entries(torch.cat(sources), torch.cat(positions), to_device(lens.contiguous(), device), merge), state

    def _flat(self, kept: Tensor, length: int) -> Tensor:
        """[num_kv_heads * length], int64: where a layer's mask is set, in order."""
        return torch.nonzero_static(kept.flatten(), size=self._geometry.num_kv_heads * length).squeeze(-1)

    def _carry_on(self, suffix: Suffix, choice: SuffixChoice, segment: Segment) -> None:
        """Entries that stay keep their sums."""
        for layer, kept in enumerate(choice.kept if suffix.sums else ()):
            sums, num = suffix.sums[layer], kept.shape[1]
            stays = sums[:, :num].flatten()[self._flat(kept, choice.lens[layer])]
            suffix.sums[layer] = torch.cat([stays.view(kept.shape[0], -1), sums[:, num:]], dim=1)
        suffix.segment, suffix.lens = segment, choice.lens

    def _show(self, suffix: Suffix, tables: Sequence[Tensor], needs: frozenset[Signal]) -> Show:
        """Give each layer's candidates as a range of tokens that starts at 0."""
        places = self._window_places(suffix) if Signal.WINDOW_QUERIES in needs else None

        def show(layer: int) -> LayerView:
            table = tables[layer]
            num = table.shape[1]
            nothing = self._store.k_arena.new_empty(0, self._geometry.num_kv_heads, self._geometry.head_dim)
            signals: dict[Signal, object] = {}
            sm_scale = 1.0
            if places is not None:
                signals[Signal.WINDOW_QUERIES], sm_scale = self._window(suffix, layer, places)
            if suffix.sums:
                signals[Signal.ACCUMULATED_ATTENTION] = suffix.sums[layer][:, :num]
            k_scale, v_scale = self._geometry.scales.of(layer)
            return LayerView(
                layer=layer,
                start=0,
                k_buffer=self._store.keys(table.T) if Signal.KEYS in needs else nothing,
                v_buffer=self._store.values(table.T) if Signal.VALUES in needs else nothing,
                token_slots=torch.arange(num, device=table.device),
                sm_scale=sm_scale,
                signals=signals,
                k_scale=k_scale,
                v_scale=v_scale,
            )

        return show

    def _window_places(self, suffix: Suffix) -> Tensor:
        """[n], int64, where the last queries are kept; none of a compressed token."""
        count = min(suffix.num_pending, self._policy.window_size, suffix.end - suffix.compressed_end)
        return self._places(suffix, count)

    def _window(self, suffix: Suffix, layer: int, places: Tensor) -> tuple[QueryWindow, float]:
        """One layer's last queries, at positions counted as those of the candidates."""
        assert self.lanes is not None
        queries, lse, sm_scale = self.lanes.rows(layer, places)
        start = suffix.lens[layer] + suffix.end - places.numel() - suffix.compressed_end
        return QueryWindow(queries, lse, start), sm_scale

    def _places(self, suffix: Suffix, count: int) -> Tensor:
        assert self.lanes is not None and suffix.lane is not None
        positions = list(range(suffix.end - count, suffix.end))
        return self.lanes.places([suffix.lane] * count, positions, self._store.k_arena.device)

    def _table(self, suffix: Suffix, layer: int, token_slots: Tensor) -> Tensor:
        """[num_kv_heads, lens + n], int32, head slots of a layer's entries, then of tokens."""
        tokens = self._store.head_slots(layer, token_slots)
        old = self._old(suffix, layer, None if suffix.segment is None else suffix.segment.head_slots)
        return tokens if old is None else torch.cat([old, tokens], dim=1)

    def _positions(self, suffix: Suffix, layer: int, num_new: int) -> Tensor:
        """[num_kv_heads, lens + num_new], int32, logical positions of a layer's entries, then of tokens."""
        device, begin = self._store.k_arena.device, suffix.compressed_end
        tokens = torch.arange(begin, begin + num_new, dtype=torch.int32, device=device)
        tokens = tokens.expand(self._geometry.num_kv_heads, -1)
        old = self._old(suffix, layer, None if suffix.segment is None else suffix.segment.positions)
        return tokens if old is None else torch.cat([old, tokens], dim=1)

    def _old(self, suffix: Suffix, layer: int, entries: Tensor | None) -> Tensor | None:
        """One layer's part of what a segment has of each entry; its runs lie one after the other."""
        if entries is None:
            return None
        heads = self._geometry.num_kv_heads
        first = heads * sum(suffix.lens[:layer])
        return entries[first : first + heads * suffix.lens[layer]].view(heads, -1)
