"""What a decode step reads, split by how often it changes.

- :class:`SpanTiles`: the spans of a batch, until requests come or go or their paths change.
- :class:`TileLayout`: how spans and suffixes are cut into tiles and merged, until a suffix grows into a new block.
- :class:`SuffixSlots`: the token slots of the suffixes, every step.

Small batches that share nothing are not cut: :class:`RowStep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvevict_kernels.ragged_attention.cpu import tile_calls
from kvevict_kernels.ragged_attention.tiles import Tiles, build_tiles, choose_block, merge_table
from sgl_kvevict.attention.batch import Path
from sgl_kvevict.attention.cpu.suffix_slots import look_up_slots
from sgl_kvevict.attention.cpu.torch_rows import RowStep, arrange_rows, fits_one_call, room_for, runs_of_requests
from sgl_kvevict.attention.span_groups import JoinedRuns, SpanGroup, group_spans, join_runs
from sgl_kvevict.geometry import KVGeometry

SHARER_CLASSES = (1, 4, 16, 64)
"""Groups with up to so many requests are padded to the same number of q rows; the last class is open."""


@dataclass(frozen=True)
class FusedCall:
    """One fused call of a layer: some suffix tiles, then some tiles of spans that one request reads alone.

    Attributes:
        suffix: range of suffix tiles; may be empty.
        q_rows: [num_tiles * group_size * num_kv_heads], int32, q rows in tile order.
        shape: of the gathered K: (num_tiles, block, num_kv_heads, head_dim).
        own_rows: head slots of the unshared tiles, flat; None without any.
        own_mask: [num_own_tiles, num_kv_heads, 1, block], float32; None without any.
    """

    suffix: slice
    q_rows: Tensor
    shape: tuple[int, int, int, int]
    own_rows: Tensor | None
    own_mask: Tensor | None


@dataclass(frozen=True)
class LayerTiles:
    """One layer's share of a layout.

    Partials are numbered through: calls in order, then ``shared`` in order; in each [num_tiles, rows, lanes].

    Attributes:
        calls: suffix tiles and tiles of unshared spans.
        shared: tiles of spans that several requests read.
        table: [num_q_rows, width], int64, partials of each q row.
        bias: [num_q_rows, width], float32, -inf where ``table`` only fills up; None if no layer needs it.
    """

    calls: list[FusedCall]
    shared: tuple[Tiles, ...]
    table: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TileLayout:
    """Tiles and merge tables for given numbers of suffix blocks.

    Attributes:
        block: KV rows per block of suffix tiles and of tiles of unshared spans (tokens).
        suffix_blocks: per request, blocks of its suffix.
        tile_request: [num_suffix_tiles], int64, place in the batch.
        tile_offset: [num_suffix_tiles], int64, first token relative to the waterline.
        layers: one per layer.
    """

    block: int
    suffix_blocks: list[int]
    tile_request: Tensor
    tile_offset: Tensor
    layers: list[LayerTiles]


@dataclass(frozen=True)
class SuffixSlots:
    """Token slots of one step's suffixes.

    Attributes:
        token_slots: [num_suffix_tiles * block], int32; fillers repeat the newest token's slot.
        mask: [num_suffix_tiles, 1, 1, block], float32, 0 or -inf.
    """

    token_slots: Tensor
    mask: Tensor


class SpanTiles:
    """The spans that a batch reads, as units; builds layouts.

    Args:
        paths: per request, the spans on its path.
        geometry: sizes.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, of entries of fitted spans; None: there are none.
    """

    def __init__(self, paths: Sequence[Path], geometry: KVGeometry, biases: Tensor | None = None) -> None:
        self.geometry = geometry
        self.num_requests = len(paths)
        self.layout: TileLayout | None = None
        self.joined: RowStep | None = None
        self._own: JoinedRuns | None = None
        self._own_groups: list[SpanGroup] = []
        self._shared: list[list[Tiles]] = []
        self._own_tiles: tuple[int, list[Tiles]] | None = None
        groups = group_spans(paths)
        for number in sorted({sharer_class(len(group.members)) for group in groups}):
            chosen = [group for group in groups if sharer_class(len(group.members)) == number]
            runs = join_runs(chosen, geometry, biases)
            if number == 0:
                self._own, self._own_groups = runs, chosen
            else:
                self._shared.append(cut_runs_into_tiles(chosen, runs, geometry, choose_block(runs.lens), lanes=1))

    def joined_for(self, suffix_lens: list[int], k_rows: Tensor, v_rows: Tensor) -> RowStep | None:
        """Return rows that need no merge; None where spans are shared, or too much is read.

        Args:
            suffix_lens: per request, tokens from the waterline on; each >= 1.
            k_rows: [num_head_slots, head_dim], the arena.
            v_rows: like ``k_rows``.
        """
        room = room_for(suffix_lens)
        if self.joined is not None and self.joined.room == room:
            return self.joined
        self.joined = None
        own = self._own
        if own is None or own.head_slots.numel() == 0 or self._shared:
            return None
        runs = runs_of_requests(self._own_groups, own, self.num_requests, self.geometry)
        rows = arrange_rows(runs.lens, room, torch.get_num_threads())
        if fits_one_call(rows, self.geometry):
            self.joined = RowStep(runs, rows, room, self.geometry, k_rows, v_rows)
        return self.joined

    def layout_for(self, suffix_lens: list[int]) -> TileLayout:
        """Return the layout for suffixes of these lengths; the last one, if it fits.

        Args:
            suffix_lens: per request, tokens from the waterline on; each >= 1.
        """
        if self.layout is not None:
            block = self.layout.block
            if self.layout.suffix_blocks == [-(-length // block) for length in suffix_lens]:
                return self.layout
        block = self._choose_block(suffix_lens)
        blocks = [-(-length // block) for length in suffix_lens]
        tile_request = torch.arange(self.num_requests).repeat_interleave(torch.tensor(blocks))
        first_tile = torch.tensor(blocks).cumsum(0) - torch.tensor(blocks)
        self.layout = TileLayout(
            block=block,
            suffix_blocks=blocks,
            tile_request=tile_request,
            tile_offset=(torch.arange(sum(blocks)) - first_tile[tile_request]) * block,
            layers=self._layer_work(block, tile_request),
        )
        return self.layout

    def _choose_block(self, suffix_lens: list[int]) -> int:
        heads = self.geometry.num_kv_heads
        lens = torch.tensor(suffix_lens).repeat_interleave(heads)[None]
        if self._own is not None:
            lens = torch.cat([lens.expand(self.geometry.num_layers, -1), self._own.lens], dim=1)
        return choose_block(lens, is_merged_anyway=self._own is not None or bool(self._shared))

    def _tiles_of_own(self, block: int) -> list[Tiles] | None:
        if self._own is None:
            return None
        if self._own_tiles is None or self._own_tiles[0] != block:
            geometry = self.geometry
            tiles = cut_runs_into_tiles(self._own_groups, self._own, geometry, block, lanes=geometry.num_kv_heads)
            self._own_tiles = (block, tiles)
        return self._own_tiles[1]

    def _layer_work(self, block: int, tile_request: Tensor) -> list[LayerTiles]:
        suffix_rows = self._suffix_q_rows(tile_request)
        own = self._tiles_of_own(block)
        span_tiles = ([] if own is None else [own]) + self._shared
        table, bias = self._merge_tables(suffix_rows, span_tiles)
        return [
            LayerTiles(
                calls=self._fused_calls(block, suffix_rows, None if own is None else own[layer]),
                shared=tuple(tiles[layer] for tiles in self._shared if tiles[layer].num_tiles),
                table=table[layer],
                bias=None if bias is None else bias[layer],
            )
            for layer in range(self.geometry.num_layers)
        ]

    def _fused_calls(self, block: int, suffix_rows: Tensor, own: Tiles | None) -> list[FusedCall]:
        lanes, head_dim = self.geometry.num_kv_heads, self.geometry.head_dim
        num_suffix = suffix_rows.shape[0]
        q_rows = suffix_rows if own is None else torch.cat([suffix_rows, own.q_rows])
        calls = []
        for tiles in tile_calls(q_rows.shape[0], block * lanes * head_dim):
            own_tiles = None
            if own is not None and tiles.stop > num_suffix:
                own_tiles = own[max(tiles.start - num_suffix, 0) : tiles.stop - num_suffix]
            calls.append(
                FusedCall(
                    suffix=slice(tiles.start, min(tiles.stop, num_suffix)),
                    q_rows=q_rows[tiles].reshape(-1),
                    shape=(tiles.stop - tiles.start, block, lanes, head_dim),
                    own_rows=None if own_tiles is None else own_tiles.kv_rows.reshape(-1),
                    own_mask=None if own_tiles is None else own_tiles.mask,
                )
            )
        return calls

    def _suffix_q_rows(self, tile_request: Tensor) -> Tensor:
        heads = self._q_heads
        return (tile_request.view(-1, 1, 1) * self.geometry.num_qo_heads + heads).int().contiguous()

    @cached_property
    def _q_heads(self) -> Tensor:
        """Q head of each (row, lane) of a suffix tile; [group_size, num_kv_heads]."""
        geometry = self.geometry
        return torch.arange(geometry.num_qo_heads).view(geometry.num_kv_heads, geometry.group_size).t()

    def _merge_tables(self, suffix_rows: Tensor, span_tiles: list[list[Tiles]]) -> tuple[Tensor, Tensor | None]:
        """Table and bias of all layers, [num_layers, num_q_rows, width]."""
        num_layers = self.geometry.num_layers
        num_rows = self.num_requests * self.geometry.num_qo_heads
        table, counts = merge_table(suffix_rows.view(-1), num_rows)
        is_filler = torch.arange(table.shape[1]) >= counts[:, None]
        table = table.expand(num_layers, -1, -1)
        is_filler = is_filler.expand(num_layers, -1, -1)
        if span_tiles:
            span_table, span_counts = _span_merge_table(span_tiles, num_rows)
            span_table = torch.where(span_counts > 0, span_table + suffix_rows.numel(), table[..., :1])
            span_filler = torch.arange(span_table.shape[2]) >= span_counts
            table = torch.cat([table, span_table], dim=2)
            is_filler = torch.cat([is_filler, span_filler], dim=2)
        if not bool(is_filler.any()):
            return table, None
        return table, torch.where(is_filler, float("-inf"), 0.0)


def sharer_class(num_members: int) -> int:
    """Index into ``SHARER_CLASSES``; 0 is for spans that one request reads alone."""
    return sum(num_members > limit for limit in SHARER_CLASSES[:-1])


def cut_runs_into_tiles(
    groups: Sequence[SpanGroup], runs: JoinedRuns, geometry: KVGeometry, block: int, lanes: int
) -> list[Tiles]:
    """Cut the runs of groups into blocks of ``block`` entries, ``lanes`` of them to a tile; the tiles of each layer."""
    tiles, counts = build_tiles(
        _q_table(groups, geometry).repeat(geometry.num_layers, 1),
        runs.starts.view(-1),
        runs.lens.view(-1),
        runs.head_slots,
        block=block,
        lanes=lanes,
        num_groups=geometry.num_layers,
        biases=runs.biases,
    )
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [tiles[end - count : end] for end, count in zip(ends, counts, strict=True)]


def locate_suffixes(
    layout: TileLayout, waterlines: list[int], seq_lens: list[int], rows: Tensor, req_to_token: Tensor
) -> SuffixSlots:
    """Look up the token slots ``[waterline, seq_len)`` of each request.

    Args:
        layout: tiles of the suffixes.
        waterlines: per request, first position to read.
        seq_lens: per request, end of the range.
        rows: [num_requests], int, rows of ``req_to_token``.
        req_to_token: [num_rows, max_context_len], int32.
    """
    bounds = torch.tensor([waterlines, seq_lens])[:, layout.tile_request]
    begins = bounds[0] + layout.tile_offset
    slots, mask = look_up_slots(begins, bounds[1], layout.block, rows[layout.tile_request], req_to_token)
    return SuffixSlots(token_slots=slots.view(-1), mask=mask[:, None, None])


def _span_merge_table(span_tiles: list[list[Tiles]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Merge table of every layer; partials are numbered from 0 in each.

    Returns:
        table [num_layers, num_rows, width] (meaningless for a row without partials), and the number of partials
        per row [num_layers, num_rows, 1].
    """
    num_layers = len(span_tiles[0])
    owners, first_partial, total = [], [], 0
    for layer in range(num_layers):
        first_partial.append(total)
        for tiles in span_tiles:
            flat = tiles[layer].owners.view(-1)
            owners.append(torch.where(flat < 0, -1, flat + layer * num_rows))
            total += flat.numel()
    table, counts = merge_table(torch.cat(owners), num_layers * num_rows)
    table = table.view(num_layers, num_rows, -1) - torch.tensor(first_partial).view(-1, 1, 1)
    return table, counts.view(num_layers, num_rows, 1)


def _q_table(groups: Sequence[SpanGroup], geometry: KVGeometry) -> Tensor:
    """Q rows of each unit, member by member; [num_groups * num_kv_heads, rows], -1 fills up."""
    widest = max(len(group.members) for group in groups)
    members = torch.full((len(groups), widest), -1)
    for i, group in enumerate(groups):
        members[i, : len(group.members)] = torch.tensor(group.members)
    heads = torch.arange(geometry.num_qo_heads).view(1, geometry.num_kv_heads, 1, geometry.group_size)
    members = members[:, None, :, None]
    rows = torch.where(members >= 0, members * geometry.num_qo_heads + heads, -1)
    return rows.reshape(len(groups) * geometry.num_kv_heads, -1)
