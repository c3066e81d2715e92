"""Decode without a merge: all that a request reads is one block per KV head.

Cutting into tiles (:mod:`sgl_kvevict.attention.decode_plan`) keeps filler small and reads shared spans once, but costs
about twice the calls. Where nothing is shared and the batch is small, the calls are what a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvevict_kernels.ragged_attention.cpu import PASS_BYTES, fused_attention
from sgl_kvevict.attention.span_tiles import SpanGroup, UnitLists
from sgl_kvevict.attention.suffix_slots import look_up_slots
from sgl_kvevict.geometry import KVGeometry

SUFFIX_ROOM = 64
"""Suffixes get room in multiples of this (tokens); a block is built anew when one has outgrown it."""


class JoinedStep:
    """One block per (request, KV head): room for the request's suffix, then the entries of its spans.

    The blocks of a layer are as wide as its longest one; what is left over repeats an entry behind a mask.

    Args:
        groups: spans that one request reads alone, at most one group per request.
        units: their runs, with at least one entry.
        num_requests: requests of the batch.
        room: tokens that each suffix has room for.
        geometry: sizes.
        k_rows: [num_head_slots, head_dim], the arena.
        v_rows: like ``k_rows``.
    """

    def __init__(
        self,
        groups: Sequence[SpanGroup],
        units: UnitLists,
        num_requests: int,
        room: int,
        geometry: KVGeometry,
        k_rows: Tensor,
        v_rows: Tensor,
    ) -> None:
        self.room = room
        self._k_rows, self._v_rows = k_rows, v_rows
        num_layers, lanes = geometry.num_layers, geometry.num_kv_heads
        members = [group.members[0] for group in groups]
        starts = torch.zeros(num_layers, num_requests, lanes, dtype=torch.int64)
        lens = torch.zeros_like(starts)
        starts[:, members] = units.kv_starts.view(num_layers, -1, lanes)
        lens[:, members] = units.kv_lens.view(num_layers, -1, lanes)
        offset = torch.arange(int(lens.max()))
        entry = starts[..., None] + torch.minimum(offset, (lens[..., None] - 1).clamp(min=0))
        # A run without entries takes another one of the batch's as filler: rows that hold numbers.
        own_rows = units.kv_indices[entry.clamp_(max=units.kv_indices.numel() - 1)]
        own_mask = torch.where(offset < lens[..., None], 0.0, float("-inf"))
        # One storage for all layers, so that a step writes the suffixes of all of them at once.
        width = room + offset.numel()
        self._kv_rows = torch.zeros(num_layers, width, num_requests, lanes, dtype=torch.int32)
        self._kv_rows[:, room:] = own_rows.permute(0, 3, 1, 2)
        self._mask = torch.zeros(num_layers, num_requests, lanes, 1, width)
        self._mask[..., 0, room:] = own_mask
        self._first_rows = (
            torch.arange(num_layers).view(-1, 1, 1, 1) * (geometry.num_token_slots * lanes) + torch.arange(lanes)
        ).int()
        self._query_shape = (num_requests, lanes, geometry.group_size, geometry.head_dim)
        gathered = torch.empty(width, num_requests, lanes, geometry.head_dim, dtype=k_rows.dtype)
        k, v = torch.empty_like(gathered, dtype=torch.float32), torch.empty_like(gathered, dtype=torch.float32)
        widths = (room + lens.amax((1, 2))).tolist()
        self._layers = [
            _LayerBlocks(rows[:w].view(-1), mask[..., :w], gathered[:w], k[:w], v[:w])
            for rows, mask, w in zip(self._kv_rows.unbind(), self._mask.unbind(), widths, strict=True)
        ]

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
        lanes = self._kv_rows.shape[3]
        torch.add(self._first_rows, slots.t()[..., None] * lanes, out=self._kv_rows[:, : self.room])
        self._mask[..., : self.room] = mask[:, None, None]

    def run(self, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attend; see :meth:`sgl_kvevict.attention.decode.DecodeStep.run`."""
        work = self._layers[layer]
        torch.index_select(self._k_rows, 0, work.kv_rows, out=work.gathered_rows)
        work.k.copy_(work.gathered)
        torch.index_select(self._v_rows, 0, work.kv_rows, out=work.gathered_rows)
        work.v.copy_(work.gathered)
        queries = q.reshape(self._query_shape).float()
        out, lse = fused_attention(queries, work.k_heads, work.v_heads, 0.0, False, attn_mask=work.mask, scale=sm_scale)
        return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:2])


class _LayerBlocks:
    """One layer's blocks, and buffers for what is gathered; views made once, because they add up over a step."""

    def __init__(self, kv_rows: Tensor, mask: Tensor, gathered: Tensor, k: Tensor, v: Tensor) -> None:
        self.kv_rows = kv_rows
        self.mask = mask
        self.gathered, self.gathered_rows = gathered, gathered.view(-1, gathered.shape[-1])
        self.k, self.v = k, v
        self.k_heads, self.v_heads = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def room_for(suffix_lens: Sequence[int]) -> int:
    """Tokens of room for suffixes of these lengths."""
    return -(-max(suffix_lens) // SUFFIX_ROOM) * SUFFIX_ROOM


def fits_one_pass(units: UnitLists, num_requests: int, room: int, geometry: KVGeometry) -> bool:
    """Whether the blocks are small enough: gathered K and V rows, in float32, stay in the caches."""
    width = room + int(units.kv_lens.max())
    return num_requests * width * geometry.num_kv_heads * geometry.head_dim * 8 <= PASS_BYTES
