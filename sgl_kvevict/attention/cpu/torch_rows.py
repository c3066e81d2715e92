"""Decode without a merge: everything that a request reads with one KV head lies in one row.

Cutting into tiles (:mod:`sgl_kvevict.attention.cpu.torch_tiles`) keeps filler small and reads shared spans once, but
costs about twice the calls. Where nothing is shared and the batch is small, the calls are what a step costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.ragged_attention.cpu import CALL_BYTES, fused_attention
from sgl_kvevict.attention.cpu.suffix_slots import look_up_slots
from sgl_kvevict.attention.span_groups import JoinedRuns, SpanGroup
from sgl_kvevict.geometry import KVGeometry

SUFFIX_ROOM = 64
"""Suffixes get room in multiples of this (tokens); rows are built anew when one has outgrown it."""
BLOCK = 16
"""Rows are multiples of this wide (entries), because a step writes the suffixes in such blocks; divides the room."""


@dataclass(frozen=True)
class Rows:
    """Which units lie in which row, and how wide the rows of a layer are.

    Attributes:
        units: [num_layers, num_rows, units_per_row], int64; the number of units stands for an empty place.
        widths: [num_layers], int64, entries of the longest row, room for suffixes included; multiples of ``BLOCK``.
    """

    units: Tensor
    widths: Tensor

    @property
    def num_entries(self) -> Tensor:
        """[num_layers], int64, entries of all rows together, filler included."""
        return self.widths * self.units.shape[1]


def runs_of_requests(
    groups: Sequence[SpanGroup], runs: JoinedRuns, num_requests: int, geometry: KVGeometry
) -> JoinedRuns:
    """Arrange spans that one request reads alone by request: units are request * num_kv_heads + KV head.

    Args:
        groups: at most one per request.
        runs: theirs.
        num_requests: requests of the batch, those without spans included.
        geometry: sizes.
    """
    shape = (geometry.num_layers, -1, geometry.num_kv_heads)
    members = [group.members[0] for group in groups]
    starts = torch.zeros(geometry.num_layers, num_requests, geometry.num_kv_heads, dtype=torch.int64)
    lens = torch.zeros_like(starts)
    starts[:, members] = runs.starts.view(shape)
    lens[:, members] = runs.lens.view(shape)
    return JoinedRuns(starts.flatten(1), lens.flatten(1), runs.head_slots, runs.biases)


def arrange_rows(lens: Tensor, room: int, num_threads: int) -> Rows:
    """Give each unit a row of its own, or put a long and a short one into each row, whichever takes less time.

    Rows of a layer are equally wide: alone, heads of uneven lengths are mostly filler. Entries are gathered by all
    threads together, which takes about as long as attending to them, but a row is attended to by one thread.

    Args:
        lens: [num_layers, num_units], int64, entries of each unit's spans.
        room: tokens of room for each unit's suffix.
        num_threads: threads that share the rows of a layer.
    """
    num_layers, num_units = lens.shape
    alone = Rows(torch.arange(num_units).expand(num_layers, -1)[..., None], _whole_blocks(room + lens.amax(1)))
    lens = torch.nn.functional.pad(lens, (0, num_units % 2))
    short, long = lens.argsort(dim=1, stable=True).chunk(2, dim=1)
    pairs = torch.stack([long.flip(1), short], dim=2)
    paired = Rows(pairs, _whole_blocks(2 * room + lens.gather(1, pairs.flatten(1)).view(pairs.shape).sum(2).amax(1)))

    def time(rows: Rows) -> float:
        num_rows = rows.units.shape[1]
        return (num_rows / num_threads + math.ceil(num_rows / num_threads)) * float(rows.widths.sum())

    return min(alone, paired, key=time)


def fits_one_call(rows: Rows, geometry: KVGeometry) -> bool:
    """Whether the rows are small enough: gathered K and V, in float32, stay in the caches."""
    return int(rows.num_entries.max()) * geometry.head_dim * 8 <= CALL_BYTES


def room_for(suffix_lens: Sequence[int]) -> int:
    """Tokens of room for suffixes of these lengths."""
    return -(-max(suffix_lens) // SUFFIX_ROOM) * SUFFIX_ROOM


class RowStep:
    """Rows filled with suffixes and spans, and attention over them.

    A row is room for the suffix of each of its units, then the entries of their spans, unit after unit, then filler.
    A query sees what is its own unit's.

    Args:
        runs: what is read of spans; not nothing.
        rows: from :func:`arrange_rows`.
        room: tokens of room for each suffix.
        geometry: sizes.
        k_rows: [num_head_slots, head_dim], the arena.
        v_rows: like ``k_rows``.
    """

    def __init__(
        self, runs: JoinedRuns, rows: Rows, room: int, geometry: KVGeometry, k_rows: Tensor, v_rows: Tensor
    ) -> None:
        self.room = room
        self._k_rows, self._v_rows = k_rows, v_rows
        num_layers, num_rows, per_row = rows.units.shape
        num_units, num_queries = runs.lens.shape[1], per_row * geometry.group_size
        self._q_shape = (num_units, geometry.group_size * geometry.head_dim)
        # Places without a unit repeat the last unit's queries; their results are not read.
        units = rows.units.clamp(max=num_units - 1)
        self._requests = units // geometry.num_kv_heads
        self._lanes = geometry.num_kv_heads
        layers = torch.arange(num_layers).view(-1, 1, 1)
        first_slots = head_slot_of(layers, 0, units % self._lanes, geometry.num_token_slots, self._lanes)
        self._first_slots = first_slots.int()[..., None]
        # One storage for all layers, so that a step writes the suffixes of all of them at once.
        entry, owner = _lay_out(runs, rows, room)
        self._head_slots, positions = _pack(runs.head_slots[entry], rows.widths)
        self._suffix_blocks = _first_blocks(positions, per_row * room).flatten()
        added = 0.0 if runs.biases is None else runs.biases[entry][:, :, None]
        seen = torch.where(owner[:, :, None] == torch.arange(per_row).view(-1, 1), added, float("-inf"))
        seen = seen[:, :, :, None].expand(-1, -1, -1, geometry.group_size, -1)
        self._mask, positions = _pack(seen, rows.widths)
        blocks = _first_blocks(positions, per_row * room).view(*seen.shape[:-1], per_row, -1)
        self._suffix_mask_blocks = blocks.diagonal(0, 2, 4).permute(0, 1, 4, 2, 3).flatten()
        self._suffix_mask_shape = (num_layers, num_rows, per_row, geometry.group_size, room)

        sizes = rows.num_entries.tolist()
        gathered = torch.empty(max(sizes), geometry.head_dim, dtype=k_rows.dtype)
        k, v = torch.empty_like(gathered, dtype=torch.float32), torch.empty_like(gathered, dtype=torch.float32)
        kv_shape = (num_rows, 1, -1, geometry.head_dim)
        self._layers = [
            _LayerRows(
                head_slots=head_slots,
                mask=mask.view(num_rows, 1, num_queries, -1),
                unit_of_place=unit_of_place,
                place_of_unit=place_of_unit[:num_units],
                gathered=gathered[:size],
                k=k[:size],
                v=v[:size],
                k_heads=k[:size].view(kv_shape),
                v_heads=v[:size].view(kv_shape),
            )
            for size, head_slots, mask, unit_of_place, place_of_unit in zip(
                sizes,
                torch.split(self._head_slots, sizes),
                torch.split(self._mask, [size * num_queries for size in sizes]),
                units.flatten(1),
                rows.units.flatten(1).argsort(dim=1),
                strict=True,
            )
        ]
        self._query_shape = (num_rows, 1, num_queries, geometry.head_dim)

    def locate(self, waterlines: list[int], seq_lens: list[int], rows: Tensor, req_to_token: Tensor) -> None:
        """Look up the token slots ``[waterline, seq_len)`` of each request, for all layers.

        Args:
            waterlines: per request, first position to read.
            seq_lens: per request, end of the range; at most ``room`` tokens.
            rows: [num_requests], int, rows of ``req_to_token``.
            req_to_token: [num_rows, max_context_len], int32.
        """
        bounds = torch.tensor([waterlines, seq_lens])
        slots, mask = look_up_slots(bounds[0], bounds[1], self.room, rows, req_to_token)
        head_slots = self._first_slots + slots[self._requests] * self._lanes
        self._head_slots.view(-1, BLOCK).index_copy_(0, self._suffix_blocks, head_slots.view(-1, BLOCK))
        seen = mask[self._requests][:, :, :, None].expand(self._suffix_mask_shape)
        self._mask.view(-1, BLOCK).index_copy_(0, self._suffix_mask_blocks, seen.reshape(-1, BLOCK))

    def run(self, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attend; see :meth:`sgl_kvevict.attention.cpu.torch_decode.TileStep.run`."""
        work = self._layers[layer]
        torch.index_select(self._k_rows, 0, work.head_slots, out=work.gathered)
        work.k.copy_(work.gathered)
        torch.index_select(self._v_rows, 0, work.head_slots, out=work.gathered)
        work.v.copy_(work.gathered)
        queries = q.reshape(self._q_shape).index_select(0, work.unit_of_place).view(self._query_shape).float()
        out, lse = fused_attention(queries, work.k_heads, work.v_heads, 0.0, False, attn_mask=work.mask, scale=sm_scale)
        num_places = work.unit_of_place.numel()
        out = out.reshape(num_places, -1).index_select(0, work.place_of_unit).to(q.dtype)
        lse = lse.reshape(num_places, -1).index_select(0, work.place_of_unit)
        return out.view(q.shape), lse.view(q.shape[:2])


@dataclass(frozen=True, slots=True)
class _LayerRows:
    """One layer's rows, and buffers for what is gathered; views made once, because they add up over a step."""

    head_slots: Tensor
    mask: Tensor
    unit_of_place: Tensor
    place_of_unit: Tensor
    gathered: Tensor
    k: Tensor
    v: Tensor
    k_heads: Tensor
    v_heads: Tensor


def _lay_out(runs: JoinedRuns, rows: Rows, room: int) -> tuple[Tensor, Tensor]:
    """Say what each column of each row holds.

    Returns:
        both [num_layers, num_rows, widest row], int64: index into ``runs.head_slots``, valid for every column, and
        the place of the column's unit in its row; units_per_row for filler.
    """
    per_row = rows.units.shape[2]
    of_units = torch.nn.functional.pad(torch.stack((runs.lens, runs.starts)), (0, 1))
    lens, starts = of_units.gather(2, rows.units.flatten(1).expand(2, -1, -1)).view(2, *rows.units.shape)
    ends = lens.cumsum(2)
    column = torch.arange(int(rows.widths.max()) - per_row * room).expand(*rows.units.shape[:2], -1)
    owner = (column[:, :, None] >= ends[..., None]).sum(2)
    shift = torch.nn.functional.pad(starts - (ends - lens), (0, 1))
    entry = column + shift.gather(2, owner)
    suffix_owner = torch.arange(per_row).repeat_interleave(room).expand(*rows.units.shape[:2], -1)
    entry = torch.nn.functional.pad(entry, (per_row * room, 0)).clamp_(max=runs.head_slots.numel() - 1)
    return entry, torch.cat([suffix_owner, owner], dim=2)


def _pack(full: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the columns of each layer to its width.

    Returns:
        what is left of ``full``, flat, and the position in it of each element of ``full`` that is left.
    """
    columns = torch.arange(full.shape[-1])
    is_kept = (columns < widths.view(-1, *[1] * (full.dim() - 1))).expand(full.shape)
    return full[is_kept], is_kept.flatten().cumsum(0).view(full.shape) - 1


def _first_blocks(positions: Tensor, num_columns: int) -> Tensor:
    """Blocks of the storage that hold the first columns of each row."""
    return positions[..., :num_columns:BLOCK] // BLOCK


def _whole_blocks(widths: Tensor) -> Tensor:
    return (widths + BLOCK - 1) // BLOCK * BLOCK
