"""D2O's merge: an evicted token joins the kept token with the most similar key, if it is similar enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.mergers.nearest import nearest_kept
from sgl_kvevict.policies.mergers.plan import merge_plan
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
        self, observations: Sequence[LayerObservation], kept: Tensor, state: PolicyState | None
    ) -> tuple[MergePlan, PolicyState]:
        """Plan the merge; see :class:`Merger`."""
        # sync: similarity blocks are sized by the longest run; once per compression
        longest = kept.sum(-1).amax(-1).tolist()
        similarity = torch.empty(kept.shape, dtype=torch.float32, device=kept.device)
        target = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        for row, observation in enumerate(observations):
            rows = observation.keys if self.match_on == "keys" else observation.values
            similarity[row], target[row] = nearest_kept(
                rows.transpose(0, 1), kept[row], longest[row], causal=self.splittable
            )
        candidates = ~kept & similarity.isfinite()
        threshold = self._threshold(similarity, candidates, state)
        merged = candidates
        if self.threshold == "ema":
            merged = candidates & (similarity >= threshold.unsqueeze(-1) - _SLACK)
        return merge_plan(kept, merged, similarity, target, self.weighting), PolicyState(threshold)

    def _threshold(self, similarity: Tensor, candidates: Tensor, state: PolicyState | None) -> Tensor:
        """[num_layers, num_kv_heads], float32: the threshold after this event; NaN before a first one."""
        total = torch.where(candidates, similarity, 0.0).sum(-1, dtype=torch.float64)
        count = candidates.sum(-1)
        if self.threshold_scope == "layer":
            total = total.sum(-1, keepdim=True).expand_as(total)
            count = count.sum(-1, keepdim=True).expand_as(count)
        mean = (total / count).float()  # NaN without candidates
        if state is None:
            return mean
        moved = self.beta * mean + (1 - self.beta) * state.threshold
        return torch.where(mean.isnan(), state.threshold, torch.where(state.threshold.isnan(), mean, moved))
