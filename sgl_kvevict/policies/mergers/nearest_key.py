"""D2O's merge: an evicted token joins the kept token with the most similar key, if it is similar enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.mergers.nearest import nearest_kept
from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.ragged import MergePlan

_SLACK = 1e-6
"""Similarities this far below the threshold still merge: rounding must not decide between equal numbers."""


@dataclass(frozen=True)
class NearestKeyMerger:
    """Cosine matching of keys, a moving threshold, and a similarity-weighted mean of keys and values.

    The threshold of a head starts as the mean of its evicted tokens' best similarities and moves with later
    compressions of the same path: ``beta * mean + (1 - beta) * previous``. Evicted tokens below it are
        dropped.

    Attributes:
        beta: weight of the newest similarities in the threshold.
        direction: "causal" merges only into later kept tokens, so that a span can be cut anywhere without
            showing a token's content before its position; "any" is the paper's rule, whose spans cannot be
            cut.
        threshold: "ema", or "none" to merge every evicted token (the paper's ablation).
        threshold_scope: a threshold per "head", or one per "layer" (released code).
        weighting: "similarity" (exp of the cosine), or "average" (the paper's Table 8).
        match_on: "keys", or "values" (Table 7).

    Source: D2O (arXiv 2406.13035), Eq. 9-12.
    Differs: Eq. 12 as printed gives weights that sum to more than 1; here the numerator is the token's own
        term. A later compression is one event of many evicted tokens, so the threshold moves by the mean of
        their maxima.
        Only tokens of the same compression can be merged into: published spans never change. Keys carry RoPE.
    """

    beta: float = 0.7
    direction: Literal["causal", "any"] = "causal"
    threshold: Literal["ema", "none"] = "ema"
    threshold_scope: Literal["head", "layer"] = "head"
    weighting: Literal["similarity", "average"] = "similarity"
    match_on: Literal["keys", "values"] = "keys"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES})

    @property
    def splittable(self) -> bool:
        """Only causal merges leave spans that may be cut."""
        return self.direction == "causal"

    def merge(
        self, observations: list[LayerObservation], kept: Tensor, state: PolicyState | None
    ) -> tuple[MergePlan, PolicyState]:
        """Plan the merge; see :class:`Merger`."""
        # sync: the similarity blocks are sized by the longest run; once per compression, on the host's clock
        longest = kept.sum(-1).amax(-1).tolist()
        similarity, target = [], []
        for observation, layer_kept, width in zip(observations, kept, longest, strict=True):
            rows = observation.keys if self.match_on == "keys" else observation.values
            best = nearest_kept(rows.transpose(0, 1), layer_kept, width, causal=self.splittable)
            similarity.append(best[0])
            target.append(best[1])
        best_similarity = torch.stack(similarity)
        candidates = ~kept & best_similarity.isfinite()
        threshold = self._threshold(best_similarity, candidates, state)
        merged = candidates
        if self.threshold == "ema":
            merged = candidates & (best_similarity >= threshold.unsqueeze(-1) - _SLACK)
        plan = merge_plan(kept, merged, best_similarity, torch.stack(target), self.weighting)
        return plan, PolicyState(threshold)

    def _threshold(self, similarity: Tensor, candidates: Tensor, state: PolicyState | None) -> Tensor:
        """[num_layers, num_kv_heads], float32: the threshold after this event; NaN before a first one."""
        total = torch.where(candidates, similarity, 0.0).double().sum(-1)
        count = candidates.sum(-1)
        if self.threshold_scope == "layer":
            total = total.sum(-1, keepdim=True).expand_as(total)
            count = count.sum(-1, keepdim=True).expand_as(count)
        mean = (total / count).float()  # NaN without candidates
        if state is None:
            return mean
        moved = self.beta * mean + (1 - self.beta) * state.threshold
        return torch.where(mean.isnan(), state.threshold, torch.where(state.threshold.isnan(), mean, moved))


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
        target: same shape, int64, token index of the target in the same run.
        weighting: see :class:`NearestKeyMerger`.

    Returns:
        The plan; within an entry its own row first, then merged tokens by position.

    Source: D2O, Eq. 11 and 12 with the numerator ``exp(u_ij) m_ij``.
    """
    shape = kept.shape
    entry_of = kept.flatten().cumsum(0).view(shape) - 1
    own = torch.arange(shape[-1], device=kept.device).expand(shape)
    entry = entry_of.gather(-1, torch.where(merged, target, own))
    # sync: how many tokens pass the threshold is data; the plan's length cannot be known before
    source = (kept | merged).flatten().nonzero().squeeze(-1)
    is_merged = merged.flatten()[source]
    order = (2 * entry.flatten()[source] + is_merged).sort(stable=True).indices
    source, is_merged = source[order], is_merged[order]
    cosine = torch.where(is_merged, similarity.flatten()[source], 1.0)
    raw = cosine.exp() if weighting == "similarity" else torch.ones_like(cosine)
    entry_sorted = entry.flatten()[source]
    counts = torch.bincount(entry_sorted)
    indptr = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=kept.device)
    indptr[1:] = counts.cumsum(0)
    norm = torch.segment_reduce(raw, "sum", offsets=indptr)
    run = source // shape[-1]
    return MergePlan(indptr.int(), run // shape[1], run % shape[1], source % shape[-1], raw / norm[entry_sorted])
