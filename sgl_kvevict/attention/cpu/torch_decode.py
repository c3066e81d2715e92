"""One new token per request: spans and suffixes in a few batched calls per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.ragged_attention.cpu import Scratch, attend_blocks, attend_tiles, merge_partials
from sgl_kvevict.attention.cpu.torch_tiles import FusedCall, SuffixSlots, TileLayout


class ArenaViews:
    """Views of the arenas, made once: what a view costs adds up over the layers of a step.

    Attributes:
        k_rows: [num_head_slots, head_dim].
        v_rows: like ``k_rows``.
        k_tokens: per layer, [num_token_slots, num_kv_heads * head_dim].
        v_tokens: like ``k_tokens``.
    """

    def __init__(self, k_arena: Tensor, v_arena: Tensor) -> None:
        self.k_rows = k_arena.view(-1, k_arena.shape[-1])
        self.v_rows = v_arena.view(-1, v_arena.shape[-1])
        self.k_tokens = list(k_arena.flatten(2).unbind())
        self.v_tokens = list(v_arena.flatten(2).unbind())


@dataclass(frozen=True)
class TileStep:
    """Runs the layers of one step.

    Suffix tiles and tiles of unshared spans have the same shape, [block, num_kv_heads] rows, and share a call: a
    gathered token row is a row of all lanes as it stands.

    Attributes:
        arenas: where K and V are.
        layout: tiles and merge tables.
        suffix: token slots of the suffixes.
        scratch: buffers, reused by all layers and steps.
    """

    arenas: ArenaViews
    layout: TileLayout
    suffix: SuffixSlots
    scratch: Scratch

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
        arenas = self.arenas
        q_rows = q.reshape(-1, q.shape[2]).float()
        partials = [self._run_call(call, layer, q_rows, sm_scale) for call in work.calls]
        for shared in work.shared:
            partials.extend(attend_tiles(shared, q_rows, arenas.k_rows, arenas.v_rows, sm_scale, self.scratch))
        out, lse = merge_partials(partials, work.table, work.bias)
        return out.view(q.shape).to(q.dtype), lse.view(q.shape[:2])

    def _run_call(self, call: FusedCall, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        arenas = self.arenas
        num_tiles, block, lanes, head_dim = call.shape
        sources = []
        mask = self.suffix.mask[call.suffix]
        if call.suffix.start < call.suffix.stop:
            slots = self.suffix.token_slots[call.suffix.start * block : call.suffix.stop * block]
            sources.append((arenas.k_tokens[layer], arenas.v_tokens[layer], slots))
        if call.own_rows is not None and call.own_mask is not None:
            sources.append((arenas.k_rows, arenas.v_rows, call.own_rows))
            mask = torch.cat([mask.expand(-1, lanes, -1, -1), call.own_mask]) if sources[1:] else call.own_mask
        q_tiles = q.index_select(0, call.q_rows).view(num_tiles, -1, lanes, head_dim)
        k, v = self.scratch.gather(call.shape, sources)
        return attend_blocks(q_tiles, k, v, mask, sm_scale)
