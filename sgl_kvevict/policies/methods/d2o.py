"""``d2o``: H2O's scores, more entries for layers of dense attention, evicted tokens merged into similar kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.methods.streaming_llm import NumSinkTokens
from sgl_kvevict.policies.options import BudgetOptions, BudgetRule
from sgl_kvevict.policies.parts import Merger
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import AccumulatedAttentionScorer
from sgl_kvevict.policies.selectors import HeavyHitterSelector
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.ragged import MergePlan

_SLACK = 1e-6
"""Similarities this far below the threshold still merge, so that rounding errors do not decide."""
_BLOCK_ELEMENTS = 1 << 18
"""Similarities computed at a time (1 MiB of float32)."""


@dataclass(frozen=True)
class NearestKeyMerger(Merger):
    """Cosine matching of keys, a threshold, and a similarity-weighted mean of keys and values.

    The threshold of a head is the mean of its evicted tokens' best similarities. Tokens below it are not merged.

    Source: D2O (arXiv 2406.13035), Eq. 9-12.
    Differs: Eq. 12 as printed gives weights that sum to more than 1; here the numerator is the token's own term. A
        compression evicts many tokens at once, so the threshold is that of the paper's prefill (Eq. 10), and starts
        anew with each compression; the paper's moves with each decoded token. Merge targets are later tokens of the
        same compression, because published spans never change and may be split at any token. Keys carry RoPE.
    """

    needs = frozenset({Signal.KEYS, Signal.VALUES})

    def merge(self, views: Sequence[LayerView], kept: Tensor) -> MergePlan:
        """Plan the merge; see :class:`Merger`."""
        # sync: similarity blocks are sized by the longest run; once per compression
        longest = kept.sum(-1).amax(-1).tolist()
        similarity = torch.empty(kept.shape, dtype=torch.float32, device=kept.device)
        target = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        for row, view in enumerate(views):
            similarity[row], target[row] = nearest_kept(view.keys.transpose(0, 1), kept[row], longest[row])
        candidates = ~kept & similarity.isfinite()
        threshold = mean_similarity(similarity, candidates)
        merged = candidates & (similarity >= threshold.unsqueeze(-1) - _SLACK)
        return merge_plan(kept, merged, similarity, target)


class D2O(BudgetOptions):
    """``d2o``."""

    name = "d2o"
    summary = "H2O's tokens, more of them in layers of dense attention; evicted ones merge into similar kept ones"
    source = "D2O (arXiv 2406.13035), Sec. 3"
    use_when = "small budgets where evicted tokens should leave a trace"

    budget_rule: BudgetRule = "density"
    num_sink_tokens: NumSinkTokens = 4
    recent_ratio: float = Field(
        0.25, ge=0, le=1, description="share of the budget for the most recent tokens (N:M = 3:1)"
    )

    def build(self) -> Policy:
        """Make the policy."""
        selector = HeavyHitterSelector(self.recent_ratio)
        sinks = self.num_sink_tokens
        return self.policy(AccumulatedAttentionScorer(), selector, NearestKeyMerger(), num_sink_tokens=sinks)


def mean_similarity(similarity: Tensor, candidates: Tensor) -> Tensor:
    """[...], float32: mean of the candidates' best similarities, [..., num_tokens], over tokens; NaN without any.

    Source: D2O (arXiv 2406.13035), Eq. 10, its first case.
    """
    total = torch.where(candidates, similarity, 0.0).sum(-1, dtype=torch.float64)
    return (total / candidates.sum(-1)).float()


def nearest_kept(rows: Tensor, kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For each token the most similar later kept token of its head (D2O, Eq. 9, which takes earlier ones, too).

    ``rows`` is [num_heads, num_tokens, head_dim], any float dtype; ``kept`` [num_heads, num_tokens], bool; ``width``
    the largest number of kept tokens of a head. Returns cosine similarities [num_heads, num_tokens], float32, -inf
    without a candidate, and positions of the kept tokens, int64, the lowest of equal ones; undefined at kept tokens.
    """
    num_heads, num_tokens, head_dim = rows.shape
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32).clamp_(min=1e-12)
    unit = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    torch.div(rows, norms, out=unit)
    width = max(width, 1)  # with nothing kept: one masked column
    position = (~kept).sort(dim=-1, stable=True).indices[:, :width]  # kept positions, ascending, first
    valid = kept.gather(-1, position)
    conserved = unit.gather(1, position.unsqueeze(-1).expand(-1, -1, head_dim)).transpose(1, 2)
    block = max(_BLOCK_ELEMENTS // (num_heads * width), 1)
    first, last, fewest = _column_bounds(kept, block)
    best = torch.empty(num_heads, num_tokens, device=rows.device)
    index = torch.empty(num_heads, num_tokens, dtype=torch.int64, device=rows.device)
    for i, begin in enumerate(range(0, num_tokens, block)):
        end = min(begin + block, num_tokens)
        low = min(first[i], width - 1)  # earlier columns precede the whole block
        similarity = unit[:, begin:end] @ conserved[..., low:]
        if fewest < width:
            similarity.masked_fill_(~valid[:, None, low:], -torch.inf)
        here = torch.arange(begin, end, device=rows.device)
        near = position[:, None, low : max(last[i], low + 1)] <= here[:, None]
        similarity[..., : near.shape[-1]].masked_fill_(near, -torch.inf)
        best[:, begin:end], columns = similarity.max(dim=-1)
        index[:, begin:end] = position.gather(-1, columns + low)
    return best, index


def _column_bounds(kept: Tensor, block: int) -> tuple[list[int], list[int], int]:
    """Per block, kept tokens up to its first token (least of all heads) and its last (most); least total of a head."""
    count = kept.cumsum(-1)
    ends = torch.arange(block, kept.shape[-1] + block, block, device=kept.device).clamp_(max=kept.shape[-1]) - 1
    bounds = torch.cat((count[:, ::block].amin(0), count[:, ends].amax(0), count[:, -1].amin(0, keepdim=True)))
    # sync: blocks multiply only columns with candidates; once per layer
    numbers = bounds.tolist()
    half = len(numbers) // 2
    return numbers[:half], numbers[half:-1], numbers[-1]


def merge_plan(kept: Tensor, merged: Tensor, similarity: Tensor, target: Tensor) -> MergePlan:
    """Sources and weights of every kept entry: its own row first, then merged tokens by position.

    All tensors are [num_layers, num_kv_heads, num_tokens]; ``target`` is the token index of a ``merged`` token's target
    in its run. Weights: ``exp(cosine)`` for a token, ``exp(1)`` for the target.

    Source: D2O (arXiv 2406.13035), Eq. 11, and Eq. 12 with the numerator ``exp(u_ij) m_ij``.
    """
    # sync: the number of tokens above the threshold depends on data; once per compression, for all layers
    sizes = (kept | merged).flatten(1).sum(-1).tolist()
    device, num_layers = kept.device, len(sizes)
    counts = []
    layer_of, heads, indices = torch.empty(3, sum(sizes), dtype=torch.int32, device=device)
    weights = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    end = 0
    for layer in range(num_layers):
        begin, end = end, end + sizes[layer]
        part = _layer_plan(kept[layer], merged[layer], similarity[layer], target[layer], sizes[layer])
        counts.append(part[0])
        layer_of[begin:end] = layer
        heads[begin:end], indices[begin:end], weights[begin:end] = part[1:]
    per_entry = torch.cat(counts)
    indptr = torch.zeros(per_entry.numel() + 1, dtype=torch.int32, device=device)
    indptr[1:] = per_entry.cumsum(0)
    return MergePlan(indptr, layer_of, heads, indices, weights)


def _layer_plan(
    kept: Tensor, merged: Tensor, similarity: Tensor, target: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer's number of sources per entry, and each source's head, token index and weight."""
    num_tokens = kept.shape[-1]
    entry_of = (kept.flatten().cumsum(0) - 1).view(kept.shape)
    own = torch.arange(num_tokens, device=kept.device).expand_as(kept)
    entry = entry_of.gather(-1, torch.where(merged, target, own)).flatten()
    # The size is known by now; without it the host would wait for the device.
    source = torch.nonzero_static((kept | merged).flatten(), size=size).squeeze(-1)
    entry, is_merged = entry[source], merged.flatten()[source]
    # An entry's own row sorts before what merges into it.
    order = (2 * entry + is_merged).sort(stable=True).indices
    source, entry, is_merged = source[order], entry[order], is_merged[order]
    cosine = torch.where(is_merged, similarity.flatten()[source], 1.0)
    raw = cosine.exp()
    counts = torch.bincount(entry)
    bounds = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=kept.device)
    bounds[1:] = counts.cumsum(0)
    weights = raw / torch.segment_reduce(raw, "sum", offsets=bounds)[entry]
    return counts, source // num_tokens, source % num_tokens, weights
