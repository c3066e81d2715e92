"""Blocks of ragged runs go through PyTorch's fused attention, then their partial results are merged.

The fused operation returns the log-sum-exp beside the output, keeps scores and softmax in float32, and works on
strided views. It cannot take sizes of 0 (it stops the process), and it returns 0 instead of -inf as the
log-sum-exp of a fully masked row: callers here never give it either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvevict_kernels.ragged_attention.tiles import Tiles

CALL_BYTES = 4 * 2**20
"""Gathered K and V rows of one call stay below this, in float32: they are read again out of the caches."""

fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q [B, heads, M, D], k [B, heads, N, D], v, 0.0, is_causal, attn_mask=, scale=) -> (out, natural lse)."""


class Scratch:
    """Buffers that gathered rows land in: fresh ones would be given back to the system, and page-faulted, every time.

    A result is valid until the next call.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, shape: tuple[int, ...], sources: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Gather K and V rows as float32, source after source.

        Args:
            shape: shape of the results.
            sources: (K rows [rows, width], V rows [rows, width], indices [n]); widths may differ, dtypes not.

        Returns:
            K and V, float32.
        """
        numel = math.prod(shape)
        gathered = self._take("gathered", sources[0][0].dtype, numel)
        begin = 0
        places = []
        for k_rows, _, indices in sources:
            end = begin + indices.numel() * k_rows.shape[1]
            places.append(gathered[begin:end].view(-1, k_rows.shape[1]))
            begin = end
        k, v = self._take("k", torch.float32, numel), self._take("v", torch.float32, numel)
        for (rows, _, indices), place in zip(sources, places, strict=True):
            torch.index_select(rows, 0, indices, out=place)
        k.copy_(gathered)
        for (_, rows, indices), place in zip(sources, places, strict=True):
            torch.index_select(rows, 0, indices, out=place)
        v.copy_(gathered)
        return k.view(shape), v.view(shape)

    def _take(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype)
        return buffer[:numel]


def attend_tiles(
    tiles: Tiles, q: Tensor, k_rows: Tensor, v_rows: Tensor, sm_scale: float, scratch: Scratch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Partial results of tiles, in calls of bounded memory; see :func:`attend_blocks` for what is returned."""
    head_dim = q.shape[1]
    _, block, lanes = tiles.kv_rows.shape
    for chosen in tile_calls(tiles.num_tiles, block * lanes * head_dim):
        part = tiles[chosen]
        kv_indices = part.kv_rows.view(-1)
        shape = (part.num_tiles, block, lanes, head_dim)
        q_tiles = q.index_select(0, part.q_rows.view(-1)).view(*part.q_rows.shape, head_dim)
        k, v = scratch.gather(shape, [(k_rows, v_rows, kv_indices)])
        yield attend_blocks(q_tiles, k, v, part.mask, sm_scale)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """One fused call over gathered tiles.

    Args:
        q: [num_tiles, rows, lanes, head_dim], float32.
        k: [num_tiles, block, lanes, head_dim], float32.
        v: like ``k``.
        mask: [num_tiles, lanes or 1, 1, block], float32, added to the scores.
        sm_scale: softmax scale.

    Returns:
        out [num_partials, head_dim] and lse [num_partials], float32, natural log; partials in the order
        [num_tiles, rows, lanes].
    """
    out, lse = fused_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, False, attn_mask=mask, scale=sm_scale
    )
    return out.transpose(1, 2).reshape(-1, q.shape[-1]), lse.transpose(1, 2).reshape(-1)


def merge_partials(partials: list[tuple[Tensor, Tensor]], table: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Combine partial softmaxes.

    The weights of the partials are the softmax of their log-sum-exps, so this is attention once more: scores
    given by the mask, partial outputs as values.

    Args:
        partials: (out [n, head_dim], lse [n]) pairs, float32, numbered through.
        table: [num_rows, width], int, partials of each row; width >= 1.
        bias: [num_rows, width], float32, -inf where ``table`` only fills up, or None.

    Returns:
        out [num_rows, head_dim] and lse [num_rows], float32.
    """
    out, lse = partials[0]
    if len(partials) > 1:
        out, lse = torch.cat([part[0] for part in partials]), torch.cat([part[1] for part in partials])
    num_rows, width = table.shape
    head_dim = out.shape[1]
    values = out.index_select(0, table.view(-1))
    scores = lse.index_select(0, table.view(-1))
    if width == 1:
        return values, scores
    scores = scores.view(num_rows, 1, 1, width)
    if bias is not None:
        scores = scores + bias.view(num_rows, 1, 1, width)
    values = values.view(num_rows, 1, width, head_dim)
    no_query = values.new_zeros(1, 1, 1, head_dim).expand(num_rows, 1, 1, head_dim)
    merged, total = fused_attention(no_query, values, values, 0.0, False, attn_mask=scores, scale=1.0)
    return merged.reshape(num_rows, head_dim), total.reshape(num_rows)


def tile_calls(num_tiles: int, tile_elements: int) -> list[slice]:
    """Ranges of tiles whose gathered rows, with ``tile_elements`` each of K and V, stay below ``CALL_BYTES``."""
    step = max(1, CALL_BYTES // (8 * tile_elements))
    return [slice(start, min(start + step, num_tiles)) for start in range(0, num_tiles, step)]
