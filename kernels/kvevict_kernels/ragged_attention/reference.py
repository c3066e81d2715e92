"""The definition: one softmax per q row over the union of what its units list."""

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
    """Let the q rows of each work unit attend, without a mask, to the KV rows of that unit; float32, loops, no tiles.

    Unit ``u`` pairs every q row in ``qo_indices[qo_indptr[u]:qo_indptr[u+1]]`` with every KV row in
    ``kv_indices[kv_indptr[u]:kv_indptr[u+1]]``. A q row in several units attends to the union of their KV rows
    in one softmax (a KV row listed twice counts twice).

    Args:
        q: [num_rows, head_dim].
        k_rows: [num_kv_rows, head_dim]: the arena seen as head slots.
        v_rows: like ``k_rows``.
        qo_indptr: [num_units + 1], ascending from 0.
        qo_indices: [qo_indptr[-1]].
        kv_indptr: [num_units + 1], ascending from 0.
        kv_indices: [kv_indptr[-1]].
        sm_scale: softmax scale.

    Returns:
        out [num_rows, head_dim], dtype of ``q``, and lse [num_rows], float32, natural log-sum-exp of the scaled
        scores. Rows that attend to nothing: 0 and -inf.
    """
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
