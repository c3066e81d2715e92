"""Products of the attention that readers pay the tokens of a range: all that a fit needs to know of their queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.geometry import KVGeometry

QUERY_STEP = 2
"""Of the queries of a pass every second one counts: half of the work, and still more than there are tokens."""
WEIGHTS_PER_TILE = {"cpu": 2**20, "cuda": 2**26}
"""Attention weights in memory at a time, at 4 bytes each: what caches hold; what is few launches."""


class AttentionProducts:
    """For any two tokens of a block, the products of what queries paid them, summed.

    Args:
        geometry: sizes of the model.
        start: logical position of the range's first token.
        num_tokens: of the range, at least one.
        block: tokens of a block; the last one may be shorter.
        value_bytes: of one number of a value, for :attr:`num_bytes`.

    Attributes:
        num_bytes: memory that it takes, with a copy of the range's values, which are fitted in the end.
    """

    def __init__(self, geometry: KVGeometry, start: int, num_tokens: int, block: int, value_bytes: int) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.block = block
        self._geometry = geometry
        self._num_blocks = -(-num_tokens // block)
        self._layers: list[Tensor | None] = [None] * geometry.num_layers
        products = 4 * self._num_blocks * block * block
        self.num_bytes = geometry.num_runs * (products + value_bytes * geometry.head_dim * num_tokens)

    def add(
        self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, token_slots: Tensor, sm_scale: float
    ) -> None:
        """Add queries of one layer.

        Args:
            layer: layer index.
            queries: [n, num_qo_heads, head_dim], after RoPE, of tokens behind the range.
            lse: [n, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
            k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys, after RoPE.
            token_slots: [num_tokens], int64, slots of the range.
            sm_scale: softmax scale of the layer.
        """
        heads, block = self._geometry.num_kv_heads, self.block
        sums = self._layers[layer]
        if sums is None:
            shape = (heads, self._num_blocks, block, block)
            sums = self._layers[layer] = torch.zeros(shape, device=queries.device)
        rows = _by_head(queries[::QUERY_STEP].float(), heads).transpose(1, 2)  # [heads, head_dim, n * group]
        totals = _by_head(lse[::QUERY_STEP, :, None], heads).transpose(1, 2) * -math.log2(math.e)
        at_once = max(WEIGHTS_PER_TILE[queries.device.type] // (heads * rows.shape[2] * block), 1)
        for first in range(0, self._num_blocks, at_once):
            last = min(first + at_once, self._num_blocks)
            slots = token_slots[first * block : last * block]
            keys = gather_rows(k_buffer, slots).float().transpose(0, 1)
            paid = torch.baddbmm(totals, keys, rows, alpha=sm_scale * math.log2(math.e)).exp2_()
            paid = pad(paid, (0, 0, 0, (last - first) * block - slots.numel()))
            paid = paid.view(heads * (last - first), block, -1)
            products = torch.bmm(paid, paid.transpose(1, 2))
            sums[:, first:last] += products.view(heads, last - first, block, block)

    def take(self, layer: int) -> Tensor | None:
        """[num_kv_heads, num_blocks, block, block], float32, of one layer, which it forgets; None: no queries came."""
        taken, self._layers[layer] = self._layers[layer], None
        return taken


def _by_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[num_kv_heads, n * group_size, width], of rows [n, num_qo_heads, width]."""
    num_queries, num_qo_heads, width = rows.shape
    grouped = rows.reshape(num_queries, num_kv_heads, num_qo_heads // num_kv_heads, width)
    return grouped.transpose(0, 1).reshape(num_kv_heads, -1, width)
