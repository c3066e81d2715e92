"""ragged_attention as its definition says it: one softmax per q row over the union of what its units list."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_attention_reference(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    *,
    qo_indptr: Tensor,
    qo_indices: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`kvevict_kernels.ragged_attention.ragged_attention`: float32, loops, no work list."""
    seen: list[list[int]] = [[] for _ in range(q.shape[0])]
    for unit in range(qo_indptr.numel() - 1):
        keys = kv_indices[int(kv_indptr[unit]) : int(kv_indptr[unit + 1])].tolist()
        for row in qo_indices[int(qo_indptr[unit]) : int(qo_indptr[unit + 1])].tolist():
            seen[row].extend(keys)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full((q.shape[0],), float("-inf"), device=q.device)
    for row, keys in enumerate(seen):
        if keys:
            scores = sm_scale * (k_rows[keys].float() @ q[row].float())
            lse[row] = torch.logsumexp(scores, 0)
            out[row] = torch.exp(scores - lse[row]) @ v_rows[keys].float()
    return out.to(q.dtype), lse
