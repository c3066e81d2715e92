"""The attention that queries pay to the stored entries of a segment."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.prefix import Segment


def add_entry_attention(
    segment: Segment, layer: int, queries: Tensor, lse: Tensor, k_arena: Tensor, sm_scale: float
) -> None:
    """Add the squares of the attention that queries pay to one layer's entries of a segment to its readings.

    The runs of the layer's heads are copied side by side, as long as the longest one may be: on a CPU as it is, on
    a GPU, whose memory nobody waits for here, as the segment has tokens.

    Args:
        segment: whose readings are open.
        layer: layer index.
        queries: [n, num_qo_heads, head_dim], after RoPE, of tokens behind the segment.
        lse: [n, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim].
        sm_scale: softmax scale of the layer.
    """
    geometry, readings = segment.geometry, segment.readings
    assert readings is not None
    if segment.num_entries == 0:
        return
    first_run = layer * geometry.num_kv_heads
    bounds = segment.indptr[first_run : first_run + geometry.num_kv_heads + 1].long()
    lens = bounds.diff()[:, None]
    width = int(lens.max()) if lens.device.type == "cpu" else segment.end - segment.start
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
    readings.squares.index_add_(0, entries.flatten(), squares.masked_fill_(~is_entry, 0.0).flatten())
