"""Dense reference of the signals a policy reads: small sizes only, for tests and to define them exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(queries: Tensor, keys: Tensor, *, sm_scale: float, query_start: int) -> tuple[Tensor, Tensor]:
    """Causal attention of queries [num_queries, num_qo_heads, head_dim] to keys [num_keys, num_kv_heads, head_dim].

    The first key has position 0, the first query ``query_start``. Returns weights [num_qo_heads, num_queries,
    num_keys] and their natural log-sum-exp [num_queries, num_qo_heads], in the dtype of the inputs.
    """
    group_size = queries.shape[1] // keys.shape[1]
    logits = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group_size, dim=1)) * sm_scale
    query_positions = query_start + torch.arange(queries.shape[0])
    logits = logits.masked_fill(torch.arange(keys.shape[0]) > query_positions[:, None], -torch.inf)
    return logits.softmax(-1), logits.logsumexp(-1).T


def accumulated_attention(weights: Tensor, num_kv_heads: int) -> Tensor:
    """:attr:`Signal.ACCUMULATED_ATTENTION`, [num_kv_heads, num_keys], of dense weights as above.

    Column sums over all queries, averaged over the query heads of a group. With all queries and keys of a prompt, each
    row sums to the prompt's length. Source: H2O (arXiv 2306.14048), Sec. 4; D2O, Eq. 4 and 6.
    """
    return weights.sum(1).view(num_kv_heads, -1, weights.shape[-1]).mean(1)
