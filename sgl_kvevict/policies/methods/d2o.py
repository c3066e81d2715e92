"""``d2o``: H2O's tokens, more of them in layers of dense attention; an evicted token joins the kept one most like it.

Source: D2O (arXiv 2406.13035), Sec. 3. Layers share the budget by :class:`DensityLayers` (Eq. 4, 5), which any method
may use; the score is that of ``h2o`` (Eq. 6), and the merge, which only this method has, is here (Eq. 9-12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.budget_options import BudgetOptions, budget_rule
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.merging.nearest import nearest_kept
from sgl_kvevict.policies.merging.plan import merge_plan
from sgl_kvevict.policies.method import Method, PaperSettings, PaperValue
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import Merger, PolicyState
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import AccumulatedAttentionScorer
from sgl_kvevict.policies.selectors import HeavyHitterSelector
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.ragged import MergePlan

_SLACK = 1e-6
"""Similarities this far below the threshold still merge: rounding must not decide between equal numbers."""


@dataclass(frozen=True)
class NearestKeyMerger(Merger):
    """Cosine matching of keys, a moving threshold, and a similarity-weighted mean of keys and values.

    The threshold of a head starts as the mean of its evicted tokens' best similarities and moves with later
    compressions of the same path: ``beta * mean + (1 - beta) * previous``. Evicted tokens below it are dropped.

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
    needs = frozenset({Signal.KEYS, Signal.VALUES})

    @property
    def splittable(self) -> bool:
        """Only causal merges leave spans that may be cut."""
        return self.direction == "causal"

    def merge(
        self, views: Sequence[LayerView], kept: Tensor, state: PolicyState | None
    ) -> tuple[MergePlan, PolicyState]:
        """Plan the merge; see :class:`Merger`."""
        # sync: similarity blocks are sized by the longest run; once per compression
        longest = kept.sum(-1).amax(-1).tolist()
        similarity = torch.empty(kept.shape, dtype=torch.float32, device=kept.device)
        target = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        for row, view in enumerate(views):
            rows = view.keys if self.match_on == "keys" else view.values
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


@dataclass(frozen=True)
class D2OOptions(BudgetOptions):
    """Options of ``d2o``."""

    budget_rule: str = budget_rule("density")
    num_sink_tokens: int = option(4, "first tokens of a path that every head keeps", minimum=0)
    recent_ratio: float = option(
        0.25, "share of the budget for the most recent tokens (N:M = 3:1)", minimum=0, maximum=1
    )
    direction: Literal["causal", "any"] = option(
        "causal",
        "merge evicted tokens into later kept tokens only, so that spans can be split, or into any (paper)",
        choices=("causal", "any"),
    )
    beta: float = option(0.7, "weight of new similarities in the moving threshold", minimum=0, maximum=1)
    threshold: Literal["ema", "none"] = option(
        "ema", "merge what reaches the moving threshold, or everything", choices=("ema", "none")
    )
    threshold_scope: Literal["head", "layer"] = option(
        "head", "one threshold per KV head or per layer", choices=("head", "layer")
    )
    weighting: Literal["similarity", "average"] = option(
        "similarity", "weights of a merge", choices=("similarity", "average")
    )
    match_on: Literal["keys", "values"] = option(
        "keys", "whose cosine similarity decides what merges where", choices=("keys", "values")
    )


def _build(options: D2OOptions) -> Policy:
    merger = NearestKeyMerger(
        options.beta,
        options.direction,
        options.threshold,
        options.threshold_scope,
        options.weighting,
        options.match_on,
    )
    return Policy(
        "d2o",
        AccumulatedAttentionScorer(),
        options.allocator(),
        HeavyHitterSelector(options.recent_ratio),
        merger,
        num_sink_tokens=options.num_sink_tokens,
    )


METHOD = Method(
    name="d2o",
    summary="H2O's tokens, more of them in layers of dense attention; evicted ones merge into similar kept ones",
    source="D2O (arXiv 2406.13035), Sec. 3",
    use_when="small budgets where evicted tokens should leave a trace",
    options_type=D2OOptions,
    build=_build,
    paper=PaperSettings(
        "D2O (arXiv 2406.13035)",
        (
            PaperValue("num_sink_tokens", 4, "Eq. 7, 8 (T; its value is not said, 4 in the released code)"),
            PaperValue("recent_ratio", 0.25, "experiments: N:M = 3:1"),
            PaperValue("direction", "any", "Eq. 9"),
            PaperValue("beta", 0.7, "Eq. 10; experiments"),
            PaperValue("threshold", "ema", "Eq. 10"),
            PaperValue("weighting", "similarity", "Eq. 11, 12"),
            PaperValue("match_on", "keys", "Eq. 9"),
            PaperValue("variance_norm", "none", "Eq. 4, 5"),
            PaperValue("density_rule", "softmax", "Eq. 5"),
        ),
    ),
)
