"""The nearest kept token of every token, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 19
"""Similarities computed at a time (2 MiB of float32)."""


def nearest_kept(rows: Tensor, kept: Tensor, width: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Best cosine similarity of each token with a kept token of its head, and which one.

    Args:
        rows: [num_heads, num_tokens, head_dim], any float dtype.
        kept: [num_heads, num_tokens], bool.
        width: most kept tokens of a head.
        causal: only kept tokens after the token count.

    Returns:
        similarity [num_heads, num_tokens], float32, -inf where no kept token counts; index [num_heads,
        num_tokens], int64, the kept token's position (the lowest of equal ones). Values at kept tokens are
        meaningless.

    Source: D2O, Eq. 9.
    Cost: num_tokens * width * head_dim per head; memory bounded by blocks.
    """
    num_heads, num_tokens, head_dim = rows.shape
    unit = rows.float().contiguous()
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    width = max(width, 1)  # with nothing kept, one column that is masked
    position = (~kept).sort(dim=-1, stable=True).indices[:, :width]  # kept positions, ascending, first
    valid = kept.gather(-1, position)
    conserved = unit.gather(1, position.unsqueeze(-1).expand(-1, -1, head_dim)).transpose(1, 2)
    block = max(_BLOCK_ELEMENTS // max(num_heads * width, 1), 1)
    best, index = [], []
    for begin in range(0, num_tokens, block):
        similarity = unit[:, begin : begin + block] @ conserved
        similarity.masked_fill_(~valid.unsqueeze(1), -torch.inf)
        if causal:
            here = torch.arange(begin, begin + similarity.shape[1], device=rows.device)
            similarity.masked_fill_(position.unsqueeze(1) <= here[:, None], -torch.inf)
        top = similarity.max(dim=-1)
        best.append(top.values)
        index.append(position.gather(-1, top.indices))
    return torch.cat(best, dim=-1), torch.cat(index, dim=-1)
