"""The nearest kept token of every token, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18
"""Similarities computed at a time (1 MiB of float32)."""


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
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32).clamp_(min=1e-12)
    unit = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    torch.div(rows, norms, out=unit)
    width = max(width, 1)  # with nothing kept, one column that is masked
    position = (~kept).sort(dim=-1, stable=True).indices[:, :width]  # kept positions, ascending, first
    valid = kept.gather(-1, position)
    conserved = unit.gather(1, position.unsqueeze(-1).expand(-1, -1, head_dim)).transpose(1, 2)
    block = max(_BLOCK_ELEMENTS // (num_heads * width), 1)
    first, last, fewest = _column_bounds(kept, block)
    best = torch.empty(num_heads, num_tokens, device=rows.device)
    index = torch.empty(num_heads, num_tokens, dtype=torch.int64, device=rows.device)
    for i, begin in enumerate(range(0, num_tokens, block)):
        end = min(begin + block, num_tokens)
        low = min(first[i], width - 1) if causal else 0  # columns before lie before the whole block
        similarity = unit[:, begin:end] @ conserved[..., low:]
        if fewest < width:
            similarity.masked_fill_(~valid[:, None, low:], -torch.inf)
        if causal:
            here = torch.arange(begin, end, device=rows.device)
            near = position[:, None, low : max(last[i], low + 1)] <= here[:, None]
            similarity[..., : near.shape[-1]].masked_fill_(near, -torch.inf)
        best[:, begin:end], columns = similarity.max(dim=-1)
        index[:, begin:end] = position.gather(-1, columns + low)
    return best, index


def _column_bounds(kept: Tensor, block: int) -> tuple[list[int], list[int], int]:
    """Which kept tokens lie before each block of tokens, and which may lie inside it.

    Returns:
        Kept tokens at or before each block's first token, in the head with the fewest; those up to its last token, in
        the head with the most; all of the head with the fewest.
    """
    count = kept.cumsum(-1)
    ends = torch.arange(block, kept.shape[-1] + block, block, device=kept.device).clamp_(max=kept.shape[-1]) - 1
    bounds = torch.cat((count[:, ::block].amin(0), count[:, ends].amax(0), count[:, -1].amin(0, keepdim=True)))
    # sync: blocks multiply only the columns that may count; once per layer
    numbers = bounds.tolist()
    half = len(numbers) // 2
    return numbers[:half], numbers[half:-1], numbers[-1]
