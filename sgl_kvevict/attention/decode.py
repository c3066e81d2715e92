"""One new token per request: spans and suffixes in a few batched calls per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvevict_kernels.ragged_attention.cpu import (
    attend_blocks,
    attend_tiles,
    merge_partials,
    tile_passes,
)
from torch import Tensor

from sgl_kvevict.attention.decode_plan import LayerWork, Layout, SuffixSlots


@dataclass(frozen=True)
class DecodeStep:
    """Runs the layers of one step.

    Suffix tiles and tiles of unshared spans have the same shape, [block, num_kv_heads] rows, and share a call: a
    gathered token row is a row of all lanes as it stands.

    Attributes:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim].
        v_arena: like ``k_arena``.
        layout: tiles and merge tables.
        suffix: token slots of the suffixes.
    """

    k_arena: Tensor
    v_arena: Tensor
    layout: Layout
    suffix: SuffixSlots

    def run(self, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            layer: layer index.
            q: [num_requests, num_qo_heads, head_dim].
            sm_scale: softmax scale.

        Returns:
            out [num_requests, num_qo_heads, head_dim], dtype of ``q``, and lse [num_requests, num_qo_heads],
            float32, natural.
        """
        work = self.layout.layers[layer]
        head_dim = q.shape[2]
        q_rows = q.reshape(-1, head_dim)
        partials = []
        num_tiles, _, lanes = work.q_rows.shape
        tile_bytes = 2 * self.layout.block * lanes * head_dim * self.k_arena.element_size()
        for tiles in tile_passes(num_tiles, tile_bytes):
            q_tiles = q_rows.index_select(0, work.q_rows[tiles].view(-1))
            partials.append(
                attend_blocks(
                    q_tiles.view(-1, *work.q_rows.shape[1:], head_dim),
                    self._gather(self.k_arena, layer, work, tiles),
                    self._gather(self.v_arena, layer, work, tiles),
                    self._mask(work, tiles),
                    sm_scale,
                )
            )
        if work.shared:
            k_rows, v_rows = self.k_arena.view(-1, head_dim), self.v_arena.view(-1, head_dim)
            for shared in work.shared:
                partials.extend(attend_tiles(shared, q_rows, k_rows, v_rows, sm_scale))
        out, lse = merge_partials(partials, work.table, work.bias)
        return out.view(q.shape), lse.view(q.shape[:2])

    def _gather(self, arena: Tensor, layer: int, work: LayerWork, tiles: slice) -> Tensor:
        """KV rows of a range of suffix and unshared tiles, [num_tiles, block, num_kv_heads, head_dim]."""
        _, num_token_slots, lanes, head_dim = arena.shape
        block = self.layout.block
        num_suffix = self.layout.tile_request.numel()
        begin, end = min(tiles.start, num_suffix), min(tiles.stop, num_suffix)
        slots = self.suffix.token_slots[begin * block : end * block]
        tokens = arena[layer].view(num_token_slots, lanes * head_dim)
        if work.own is None or tiles.stop <= num_suffix:
            return tokens.index_select(0, slots).view(-1, block, lanes, head_dim)
        rows = arena.new_empty(tiles.stop - tiles.start, block, lanes, head_dim)
        own = work.own.kv_rows[max(tiles.start - num_suffix, 0) : tiles.stop - num_suffix]
        torch.index_select(tokens, 0, slots, out=rows[: end - begin].view(-1, lanes * head_dim))
        torch.index_select(
            arena.view(-1, head_dim), 0, own.reshape(-1), out=rows[end - begin :].view(-1, head_dim)
        )
        return rows

    def _mask(self, work: LayerWork, tiles: slice) -> Tensor:
        num_suffix = self.layout.tile_request.numel()
        suffix = self.suffix.mask[tiles.start : tiles.stop]
        if work.own is None or tiles.stop <= num_suffix:
            return suffix
        own = work.own.mask[max(tiles.start - num_suffix, 0) : tiles.stop - num_suffix]
        return torch.cat([suffix.expand(-1, own.shape[1], -1, -1), own])
