"""How large a value is once the layer's output projection has added it to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


def output_gram(weight: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Product of an output projection with itself, summed over the query heads that read a KV head.

    ``v @ gram @ v`` is the squared length of what a value adds to the residual stream.

    Args:
        weight: [hidden_size, num_qo_heads * head_dim], any float dtype.
        num_kv_heads: KV heads.
        head_dim: width of a head.

    Returns:
        [num_kv_heads, head_dim, head_dim], float32.
    """
    by_head = weight.detach().float().t().reshape(num_kv_heads, -1, head_dim, weight.shape[0])
    return torch.einsum("hgdo,hgeo->hde", by_head, by_head)
