"""From matches to the list of weighted rows that compaction runs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sgl_kvevict.ragged import MergePlan


def merge_plan(
    kept: Tensor,
    merged: Tensor,
    similarity: Tensor,
    target: Tensor,
    weighting: Literal["similarity", "average"],
) -> MergePlan:
    """Weights of every kept entry's sources.

    Args:
        kept: [num_layers, num_kv_heads, num_tokens], bool.
        merged: same shape, bool; evicted tokens that live on.
        similarity: same shape, float32, of each evicted token with its target.
        target: same shape, int32, token index of the target in the same run.
        weighting: "similarity" gives a token ``exp(cosine)`` and the target ``exp(1)``; "average" the same to all.

    Returns:
        The plan; within an entry its own row first, then merged tokens by position.

    Source: D2O (arXiv 2406.13035), Eq. 11, and Eq. 12 with the numerator ``exp(u_ij) m_ij``.
    """
    # sync: how many tokens pass the threshold is data; once per compression, for all layers
    sizes = (kept | merged).flatten(1).sum(-1).tolist()
    device, num_layers = kept.device, len(sizes)
    counts = []
    layer_of, heads, indices = torch.empty(3, sum(sizes), dtype=torch.int32, device=device)
    weights = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    end = 0
    for layer in range(num_layers):
        begin, end = end, end + sizes[layer]
        part = _layer_plan(kept[layer], merged[layer], similarity[layer], target[layer], sizes[layer], weighting)
        counts.append(part[0])
        layer_of[begin:end] = layer
        heads[begin:end], indices[begin:end], weights[begin:end] = part[1:]
    per_entry = torch.cat(counts)
    indptr = torch.zeros(per_entry.numel() + 1, dtype=torch.int32, device=device)
    indptr[1:] = per_entry.cumsum(0)
    return MergePlan(indptr, layer_of, heads, indices, weights)


def _layer_plan(
    kept: Tensor,
    merged: Tensor,
    similarity: Tensor,
    target: Tensor,
    size: int,
    weighting: Literal["similarity", "average"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer's sources per entry, and each source's head, token index and weight."""
    num_tokens = kept.shape[-1]
    entry_of = (kept.flatten().cumsum(0) - 1).view(kept.shape)
    own = torch.arange(num_tokens, device=kept.device).expand_as(kept)
    entry = entry_of.gather(-1, torch.where(merged, target, own)).flatten()
    source = torch.nonzero_static((kept | merged).flatten(), size=size).squeeze(-1)
    entry, is_merged = entry[source], merged.flatten()[source]
    order = (2 * entry + is_merged).sort(stable=True).indices
    source, entry, is_merged = source[order], entry[order], is_merged[order]
    cosine = torch.where(is_merged, similarity.flatten()[source], 1.0)
    raw = cosine.exp() if weighting == "similarity" else torch.ones_like(cosine)
    counts = torch.bincount(entry)
    bounds = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=kept.device)
    bounds[1:] = counts.cumsum(0)
    weights = raw / torch.segment_reduce(raw, "sum", offsets=bounds)[entry]
    return counts, source // num_tokens, source % num_tokens, weights
